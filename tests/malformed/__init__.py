"""Tables of malformed inputs. `tests/test_malformed_inputs.py` hands each to the command."""
