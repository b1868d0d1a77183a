"""An application and its own tests, which `manage.py test` runs: see test_django_testing.py."""
