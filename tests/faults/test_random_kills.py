"""No wrong verdict, no lost checkpoint, no orphan, no stranger signalled, whoever is killed and whenever."""

import random
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.conftest import write_chats
from tests.faults.random_kills import MOMENTS, STEPS, Series, write_config

EAGER = tuple(moment for moment in MOMENTS if moment != "compiling")
pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory, target_folder: Path) -> tuple[Path, Path, dict[bool, str]]:
    folder = tmp_path_factory.mktemp("kills")
    return target_folder, write_chats(folder / "chats.jsonl", count=16), {}


def undisturbed(folder: Path, config: Path, compiled: bool, known: dict[bool, str]) -> str:
    """The digest that every series must end with."""
    if compiled not in known:
        known[compiled] = Series(folder / "reference", config, random.Random(0)).finish()
    return known[compiled]


def strike(folder: Path, config: Path, kills: int, seed: int, moments: tuple[str, ...], reference: str) -> list[str]:
    """`kills` strikes, in as many series as they take; each series ends in the undisturbed run's weights."""
    rng, told, number = random.Random(seed), [], 0
    series = Series(folder / f"{seed}-{number}", config, rng)
    series.begin()
    try:
        for _ in range(kills):
            series.strike(moments)
            if series.newest_whole() == STEPS:
                assert series.finish() == reference
                told += [str(strike) for strike in series.strikes]
                series.end()
                shutil.rmtree(series.folder)
                number += 1
                series = Series(folder / f"{seed}-{number}", config, rng)
                series.begin()
        assert series.finish() == reference
        return told + [str(strike) for strike in series.strikes]
    except AssertionError as error:
        raise AssertionError(f"{error} | after {series.strikes} in {series.run}") from error
    finally:
        series.end()


def run_kills(
    ground: tuple[Path, Path, dict[bool, str]], tmp_path: Path, kills: int, seed: int, moments: tuple[str, ...], lanes: int = 1
) -> None:
    target, chats, known = ground
    compiled = "compiling" in moments
    config = write_config(chats.parent, target, chats, compiled=compiled)
    reference = undisturbed(chats.parent / str(compiled), config, compiled, known)
    shares = [kills // lanes + (lane < kills % lanes) for lane in range(lanes)]
    with ThreadPoolExecutor(lanes) as pool:
        done = [
            pool.submit(strike, tmp_path, config, share, 1000 * seed + lane, moments, reference)
            for lane, share in enumerate(shares)
        ]
        for lane in done:
            print("\n".join(lane.result()))


@pytest.mark.long
def test_a_few_kills(ground: tuple[Path, Path, dict[bool, str]], tmp_path: Path) -> None:
    run_kills(ground, tmp_path, 4, 77, EAGER, lanes=2)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_eighteen_kills_of_eager_runs(ground: tuple[Path, Path, dict[bool, str]], tmp_path: Path, seed: int) -> None:
    run_kills(ground, tmp_path, 18, seed, EAGER, lanes=2)


@pytest.mark.slow
def test_ten_kills_of_compiled_runs(ground: tuple[Path, Path, dict[bool, str]], tmp_path: Path) -> None:
    run_kills(ground, tmp_path, 10, 100, ("compiling", "training", "saving"), lanes=2)
