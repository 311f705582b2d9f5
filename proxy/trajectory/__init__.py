"""Steps and the token sequences that they form. All modules are pure."""
