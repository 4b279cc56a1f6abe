"""What this machine can do, as findings: gathered here, printed by `hisparse doctor`.

Every file looks at one kind of thing. Nothing here needs a GPU, cuda-bindings or a working torch: what is missing or
broken is itself a finding, with the command that mends it.
"""
