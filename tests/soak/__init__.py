"""A long run with faults: producers, workers and a nemesis for minutes or hours, and a checker that verifies the
result.

    python -m tests.soak --minutes 20 --seed 7
"""
