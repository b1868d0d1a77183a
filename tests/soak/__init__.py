"""The outbox under fire: producers, workers and a nemesis for minutes or hours, and a checker that reads the books.

python -m tests.soak --minutes 20 --seed 7
"""
