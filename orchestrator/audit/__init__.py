"""The audit of a training script: is its update that of one big batch?"""
