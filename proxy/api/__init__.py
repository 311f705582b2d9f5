"""The HTTP servers of the model API, the control API, the page and the protocols of other systems."""
