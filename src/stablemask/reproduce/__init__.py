"""The paper's tables and figures as data, the scaled-down study, and what was measured.

* ``paper.toml``: every value that the paper prints, with its place, and what repeats it.
* ``study.toml``: the scaled-down models and their training; ``claims.toml``: what is asked of them, and how
  large an effect has to be to count.
* ``corpus``: the text of the study, tokenised into one folder that can be carried to another machine.
* ``cells``: one model of the study, trained and measured, is one JSON file; ``worker`` makes those that are
  missing, in any number of processes.
* ``judge``, ``page``: verdicts, tables, figures.
"""
