from types import SimpleNamespace

import pytest
import torch

from lmkit.cli.app import run_command_line
from lmkit.commands import bench
from lmkit.errors import LmkitError, UsageError
from lmkit.recipe.load import load_recipe
from lmkit.storage import FolderLock


@pytest.mark.parametrize("name", ["attention", "model"])
def test_the_threads_of_the_recipe_are_obeyed(monkeypatch, tmp_path, name):
    """A recipe with `run.threads = 3` is measured with three."""
    seen = []

    def run_bench(options, **_):
        seen.append(torch.get_num_threads())
        raise KeyboardInterrupt

    module = __import__(f"lmkit.bench.{name}", fromlist=["run_bench"])
    monkeypatch.setattr(module, "run_bench", run_bench)
    recipe = load_recipe(f"bench_{name}_cpu", ["run.threads=3"])
    before = torch.get_num_threads()
    with pytest.raises(KeyboardInterrupt):
        getattr(bench, name)(recipe, tmp_path, lambda *_: None)
    assert seen == [3]
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("began", [False, True])
@pytest.mark.parametrize("name", ["ddp", "all_reduce", "optimizer"])
def test_a_bench_that_is_interrupted_before_its_first_row_says_that_there_are_none(
    monkeypatch, tmp_path, name, began
):
    """Also where the file of the rows was opened already."""
    (tmp_path / bench.JOURNAL).write_text('{"of": "a run that was killed before"}')

    def interrupted(*_, journal, **__):
        if began:
            journal.path.touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "_need_ranks", lambda ranks, command: None)
    monkeypatch.setattr(f"lmkit.bench.{name}.{name}_rows", interrupted)
    with pytest.raises(bench.Interrupted, match=r"^interrupted: no rows were kept$"):
        getattr(bench, name)(load_recipe("bench_ddp_cpu"), tmp_path, 1, lambda *_: None)


def test_of_several_ranks_under_torchrun_the_first_says_what_is_kept(monkeypatch, tmp_path):
    (tmp_path / bench.JOURNAL).write_text('{"of": "the first rank, which is at work"}')

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("lmkit.commands.bench._on_ranks", interrupted)
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(KeyboardInterrupt) as stop:
        bench.ddp(load_recipe("bench_ddp_cpu"), tmp_path, 1, lambda *_: None)
    assert not isinstance(stop.value, bench.Interrupted)
    assert (tmp_path / bench.JOURNAL).exists()


def attention_with(monkeypatch, folder, meanwhile):
    """Bench attention into `folder`; `meanwhile` is called instead of measuring, and again where files are stored."""
    result = SimpleNamespace(name="attention", files={}, environment={}, rows=[], table=str, measured=True)

    def run_bench(*_, **__):
        meanwhile()
        return result

    def write(path, content):
        meanwhile()

    monkeypatch.setattr("lmkit.bench.attention.run_bench", run_bench)
    monkeypatch.setattr(bench, "write_atomic", write)
    return bench.attention(load_recipe("bench_attention_cpu"), folder, lambda *_: None)


def test_two_benches_in_one_folder_the_second_is_refused_until_the_files_of_the_first_are_there(
    monkeypatch, tmp_path
):
    refused = []

    def begin_another():
        with pytest.raises(LmkitError, match="another process is working in this folder") as error:
            bench.ddp(load_recipe("bench_ddp_cpu"), tmp_path, 1, lambda *_: None)
        refused.append(str(tmp_path) in error.value.message)

    monkeypatch.setattr(bench, "_on_ranks", lambda *_: None)
    attention_with(monkeypatch, tmp_path, begin_another)
    assert refused == [True] * 3  # while it measured, and at each of two files
    attention_with(monkeypatch, tmp_path, lambda: None)


def test_ranks_other_than_the_first_leave_the_folder_to_it(monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "_on_ranks", lambda *_: None)
    monkeypatch.setenv("RANK", "1")
    with FolderLock(tmp_path):
        assert bench.ddp(load_recipe("bench_ddp_cpu"), tmp_path, 1, lambda *_: None) is None


def test_the_lm_matrix_is_told_what_the_run_says(monkeypatch, tmp_path):
    from lmkit.bench import lm_matrix

    monkeypatch.setattr(lm_matrix, "run_bench", lambda options, **_: SimpleNamespace(options=options))
    monkeypatch.setattr(bench, "_store", lambda result, recipe, output: result.options)
    said = ["run.threads=3", "run.deterministic=true", "run.seed=7"]
    recipe = load_recipe("lm_matrix_cpu", [*said, "parallel.backend=gloo", "parallel.timeout_s=9"])
    options = bench.lm_matrix(recipe, tmp_path, 2, lambda *_: None)
    assert (options.threads, options.deterministic, options.seed, options.nproc) == (3, True, 7, 2)
    assert (options.backend, options.timeout_s) == ("gloo", 9)


@pytest.mark.parametrize("name", ["ddp", "all_reduce", "optimizer"])
def test_benches_on_ranks_are_told_where_to_report(monkeypatch, tmp_path, name):
    reports = []

    def rows(*_, progress, **__):
        progress("half", 1, 2)
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "_need_ranks", lambda ranks, command: None)
    monkeypatch.setattr(f"lmkit.bench.{name}.{name}_rows", rows)
    with pytest.raises(KeyboardInterrupt):
        getattr(bench, name)(
            load_recipe("bench_ddp_cpu"), tmp_path, 1, lambda *report: reports.append(report)
        )
    assert reports == [("half", 1, 2)]


@pytest.mark.parametrize(("asked", "given"), [("auto", None), ("gloo", "gloo")])
def test_the_backend_of_the_recipe_is_measured(monkeypatch, tmp_path, asked, given):
    seen = []

    def group(device, **settings):
        seen.append((device, settings["backend"]))
        raise KeyboardInterrupt

    monkeypatch.setattr("lmkit.training.process.process_group", group)
    recipe = load_recipe("bench_ddp_cpu", [f"parallel.backend={asked}"])
    with pytest.raises(KeyboardInterrupt):
        bench.all_reduce(recipe, tmp_path, 1, lambda *_: None)
    assert seen == [("cpu", given)]


@pytest.mark.parametrize(("name", "of"), [("all_reduce", "bench_ddp_cpu"), ("lm_matrix", "lm_matrix_cpu")])
def test_nccl_between_cpus_is_refused(tmp_path, name, of):
    recipe = load_recipe(of, ["parallel.backend=nccl"])
    with pytest.raises(UsageError, match=r"parallel\.backend: .nccl. works between GPUs"):
        getattr(bench, name)(recipe, tmp_path, 1, lambda *_: None)


def test_what_the_first_rank_reports_is_shown_by_the_process_that_started_it(tmp_path):
    reports = []
    sizes = ["bench.all_reduce.sizes_mb=[0.01, 0.02]", "bench.all_reduce.dtypes=['fp32']"]
    recipe = load_recipe("bench_ddp_cpu", [*sizes, "bench.all_reduce.repeats=1"])
    bench.all_reduce(recipe, tmp_path, 2, lambda *report: reports.append(report))
    assert reports == [("all-reduce", 0, 2), ("all-reduce", 1, 2)]


@pytest.mark.parametrize(
    ("kernels", "code"), [(["--kernels", "flash_triton:hopper"], 1), (["--kernels", "sdpa"], 0)]
)
def test_a_bench_that_could_measure_nothing_fails_and_says_why(tmp_path, capsys, kernels, code):
    tiny = ["--tiers", "16", "--iters", "1", "--no-backward", "--set", "bench.attention.grid_lengths=[]"]
    arguments = [
        "bench",
        "attention",
        "bench_attention_cpu",
        *tiny,
        *kernels,
        "--output",
        str(tmp_path / "out"),
    ]
    assert run_command_line(arguments) == code
    printed = capsys.readouterr().out
    assert ("nothing in this table could be measured" in printed) == (code == 1)
    assert ("unsupported: flash_triton" in printed) == (code == 1)
    assert (tmp_path / "out" / "attention_sweep_report.md").exists()
    assert "What was found\n\n- " in (tmp_path / "out" / "attention_sweep_report.md").read_text()


@pytest.mark.parametrize("table", ["ddp", "optimizer"])
def test_a_precision_that_the_contenders_do_not_have_is_refused(table):
    with pytest.raises(UsageError, match=rf"bench\.{table}\.precision"):
        load_recipe("bench_ddp_cpu", [f"bench.{table}.precision=fp16"])


def test_two_texts_of_one_name_are_refused(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.txt").write_text("text")
    texts = f'["{tmp_path}/a/x.txt", "{tmp_path}/b/x.txt"]'
    recipe = load_recipe("bench_tokenizer", [f"bench.tokenizer.texts={texts}"])
    with pytest.raises(UsageError, match=r"bench\.tokenizer\.texts: two are called x"):
        bench.tokenizer(recipe, tmp_path / "out", lambda *_: None)
