"""verl: its trainer, actor and corrections, with rollouts drawn here under a compressed cache (docs/from_verl.md).

``VERL_USE_EXTERNAL_MODULES=sparse_rl_lightning.integrations.verl.register`` makes ``rollout.name=sparse_rl`` known.
"""
