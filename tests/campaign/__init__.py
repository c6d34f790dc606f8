"""A seeded campaign: ledgered calls in eleven ways while everything around them is disturbed. See docs/reliability.md.

`python -m campaign --seconds 60 --seed 1` from tests/, or `make campaign`. The parts:

- `book`: what callers were told and what ran, and whether both agree; knows neither Ray nor actorsub.
- `actors`: the actors, which write down what they begin.
- `network`: a second node behind virtual network interfaces, where this machine permits it.
- `callers`: who makes the calls.
- `disturbances`: the schedule, and what it does.
- `driver`: the process that calls; `__main__`: the one that starts it, sees it end, and compares.
"""
