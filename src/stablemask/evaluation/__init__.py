"""Evaluations. Each is a generator of ``(name, value)`` pairs; ``stablemask eval`` runs them.

* ``perplexity``: per token and per byte, and by position.
* ``extrapolation``: perplexity past the training length, with all keys and in windows; streaming.
* ``position_tasks``: tasks that need absolute positions, learned by small models.
* ``latency``: the price of StableMask in generation, with a cache and without.
* ``harness``: downstream tasks.
"""
