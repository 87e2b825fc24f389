import pytest


@pytest.fixture
def update(request):
    return request.config.getoption("--update-golden")
