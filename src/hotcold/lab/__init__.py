"""A laboratory for gradients: policies small enough that every response, and every group of them, is summed over."""
