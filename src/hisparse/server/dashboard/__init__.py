"""One page for people: what the server does right now.

`figures.py` gathers what it shows, fed by the engine loop; `pages.py` serves it. The page itself is index.html,
dashboard.css and dashboard.js beside this file, with nothing to build and nothing from elsewhere.
"""
