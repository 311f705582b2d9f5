"""The tiny model with an output layer of its own: vLLM 0.32 reloads weights, but not an output layer that is tied.

Run by the python that has TRL (environment.py does): `python untied_model.py TINY FOLDER`.
"""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

tiny, folder = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
model.config.tie_word_embeddings = False
model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
model.save_pretrained(folder)
AutoTokenizer.from_pretrained(tiny).save_pretrained(folder)
