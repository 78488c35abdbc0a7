"""The figures of several workers are merged into one."""

from dataclasses import fields

import msgspec

from motet.engine_info import UNKNOWN_VOCABULARY, EngineKind
from motet.metrics.stats import EngineStats, total_stats
from motet.routing.router import MIXED, common_info
from motet.testing.fake_engine import fake_info
from motet.transfer.ticket import TransferAddress

PLAIN = [field.name for field in fields(EngineStats) if type(field.default) in (int, float)]


def test_every_plain_figure_is_summed() -> None:
    one = EngineStats(**{name: 2**place for place, name in enumerate(PLAIN)})
    two = EngineStats(**{name: 3**place for place, name in enumerate(PLAIN)})
    total = total_stats([one, two])
    assert [getattr(total, name) for name in PLAIN] == [2**place + 3**place for place in range(len(PLAIN))]


def test_totals_are_sums_by_bucket_and_kind_and_the_age_of_the_oldest() -> None:
    one = EngineStats(
        steps=1, transfer_seconds_sum=0.5, oldest_lease_s=2.0, transfer_seconds=(1, 2), transfer_failures={"stale": 1}
    )
    two = EngineStats(
        steps=2,
        transfer_seconds_sum=0.25,
        oldest_lease_s=3.0,
        transfer_seconds=(10, 20, 30),
        transfer_failures={"stale": 2, "timeout": 1, "closed": 0},
    )
    assert total_stats([one, EngineStats(), two]) == EngineStats(
        steps=3,
        transfer_seconds_sum=0.75,
        oldest_lease_s=3.0,
        transfer_seconds=(11, 22, 30),
        transfer_failures={"stale": 3, "timeout": 1, "closed": 0},
    )


def test_the_totals_of_one_worker_are_its_own_figures() -> None:
    one = EngineStats(groups_running=1, oldest_lease_s=0.0, transfer_seconds=(1,))
    assert total_stats([one]) == one


def test_common_info_has_the_smallest_limits_of_all_workers() -> None:
    one = msgspec.structs.replace(fake_info(transfer=TransferAddress("x", "127.0.0.1", 1)), pid=1)
    two = msgspec.structs.replace(one, max_model_len=100, num_blocks=7, max_num_seqs=2, pid=2)
    assert common_info([one]) is one
    assert common_info([one, two]) == common_info([two, one])
    assert common_info([one, two]) == msgspec.structs.replace(two, pid=None, transfer=None)


def test_if_one_worker_differs_equal_texts_are_not_promised() -> None:
    one = fake_info()
    other = msgspec.structs.replace(one, fingerprint="other-same")
    assert common_info([one, one]).fingerprint == "fake-same"
    assert common_info([one, other]).fingerprint == MIXED
    newer = msgspec.structs.replace(one, weight_version="7")
    assert common_info([newer, newer]).weight_version == "7"
    assert common_info([newer, one]).weight_version == MIXED
    trained = msgspec.structs.replace(one, model_digest="5e0c")
    assert common_info([trained, trained]).model_digest == "5e0c"
    assert common_info([trained, one]).model_digest == ""


def test_the_smallest_cache_is_the_one_for_the_fewest_tokens() -> None:
    small = msgspec.structs.replace(fake_info(), block_size=16, num_blocks=1000, bytes_per_block=1)
    large = msgspec.structs.replace(fake_info(), block_size=128, num_blocks=364, bytes_per_block=8)
    common = common_info([large, small])
    assert (common.block_size, common.num_blocks, common.bytes_per_block) == (16, 1000, 1)


def test_a_value_that_one_engine_does_not_report_comes_from_the_others() -> None:
    ours = fake_info(vocab_size=512, eos_token_ids=(0, 7), default_sampling_params={"top_k": 5})
    silent = msgspec.structs.replace(
        ours, kind=EngineKind.VLLM, vocab_size=UNKNOWN_VOCABULARY, eos_token_ids=(), default_sampling_params=None
    )
    for infos in ([ours, silent], [silent, ours]):
        common = common_info(infos)
        assert (common.vocab_size, common.eos_token_ids) == (512, (0, 7))
        assert common.default_sampling_params == {"top_k": 5}
    assert common_info([silent, silent]).vocab_size == UNKNOWN_VOCABULARY
    assert not MIXED.endswith("-same")
