"""The routes, responses and stream chunks of vLLM 0.32."""
