"""The ledger: one append-only file per run with its steps, saves, failures and restarts; see `jzero.ledger.schema`."""

from jzero.ledger.goodput import Goodput as Goodput
from jzero.ledger.read import Run as Run
from jzero.ledger.read import Step as Step
from jzero.ledger.read import read as read
