"""The configuration: schema, rules, and composition by Hydra."""
