"""Assertions of the contract of the brokers explain themselves, as those of a test do."""

import pytest

pytest.register_assert_rewrite("tests.transports.contract")
