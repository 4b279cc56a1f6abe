"""An OpenAI-compatible server over the engine. Installed with `pip install hisparse[serve]`.

`engine_loop.py` runs the engine on a thread of its own; `app.py` is the web application in front of it;
`serving.py` is the process around both, as `hisparse serve` starts it.
"""
