"""Train a language model by policy gradient on any score."""
