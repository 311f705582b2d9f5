"""The options of an engine."""

from proxy.simulator.options import Options


def test_an_engine_needs_no_options():
    """Left alone an engine is a vLLM named "simulated" of 32,768 tokens, waits not and takes any model."""
    options = Options()

    assert (options.shape, options.model, options.max_model_len) == ("vllm", "simulated", 32_768)
    assert (options.seed, options.token_delay_s, options.strict_models) == (None, 0.0, False)
