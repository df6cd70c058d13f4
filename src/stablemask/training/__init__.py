"""Pretraining: recipes, and the run on transformers' Trainer."""

from stablemask.training.plan import Plan, plan
from stablemask.training.recipe import ModelConfig, Recipe, TrainConfig, load_recipe
from stablemask.training.run import Summary, train

__all__ = ["ModelConfig", "Plan", "Recipe", "Summary", "TrainConfig", "load_recipe", "plan", "train"]
