"""The routes, responses and stream chunks of SGLang 0.5.23."""
