"""The bundled valkey-server.

server    starts, monitors and stops the process
launcher  the program that is replaced by valkey-server and stops with its parent
aof       checks the append-only files before a start and repairs them after a crash
"""
