"""The bundled valkey-server: started, watched, repaired after a crash, and stopped.

server     its process
launcher   the program that becomes it, and ends with its owner
aof        its append-only files: checked before it starts, repaired after a crash
"""
