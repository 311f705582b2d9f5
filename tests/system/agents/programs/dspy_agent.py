"""DSPy's ReAct, which writes and reads calls as text."""

import dspy
from weather import MODEL, TASK, report, weather

dspy.configure(lm=dspy.LM(f"openai/{MODEL}", cache=False))
report(dspy.ReAct("question -> answer", tools=[weather])(question=TASK).answer)
