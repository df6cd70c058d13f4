"""Pretraining: recipes, and the run on transformers' Trainer."""

from stablemask.training.recipe import ModelConfig, Recipe, TrainConfig, load_recipe

__all__ = ["ModelConfig", "Recipe", "TrainConfig", "load_recipe"]
