"""The options of an engine."""

from proxy.simulator.options import Options


def test_every_option_has_a_default():
    """By default an engine is a vLLM with model "simulated", 32,768 tokens, no delay, and accepts any model name."""
    options = Options()

    assert (options.shape, options.model, options.max_model_len) == ("vllm", "simulated", 32_768)
    assert (options.seed, options.token_delay_s, options.strict_models) == (None, 0.0, False)
