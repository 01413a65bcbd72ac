"""The cut of a call's tiles where some workers begin late: every tile once, and what the combine kernel finds of it."""

import re
import shutil
import subprocess
from dataclasses import replace

import pytest
import torch

from hopper_on_cpu import AVAILABLE
from quantkv.implementations.hopper import attend as hopper
from quantkv.implementations.hopper.host.nvrtc import find
from test_hopper_latents import LENS, batch_of, check, run, runs, with_copies

CHECK = r"""
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#define DI inline
using std::max; using std::min;
enum { LATENTS = 1, SEGMENTS = 2 };
%s
int main() {
  long cuts = 0, late_cuts = 0;
  for (int resident = 1; resident <= 14; resident++)
    for (int late = 0; late < resident; late++)
      for (int less = 1; less <= 7; less++)
        for (int tiles = 1; tiles <= 120; tiles++, cuts++) {
          const Cut cut(tiles, resident, late, less);
          const int early = resident - late;
          bool right = cut.workers >= 1 && cut.workers <= resident && cut.begin(0) == 0 && cut.begin(cut.workers) == tiles;
          int most = 0, least = tiles;
          for (int w = 0; w < cut.workers; w++) {
            const int own = cut.begin(w + 1) - cut.begin(w), as_early = w < early ? own : own + less;
            most = max(most, as_early), right = right && own > 0;
            if (late && tiles >= less * early) least = min(least, as_early); else least = min(least, own);
            for (int t = cut.begin(w); t < cut.begin(w + 1); t++) right = right && cut.worker_of(t) == w;
          }
          if (late && tiles >= less * early) late_cuts++, right = right && most - least <= 1;
          if (late && tiles < less * early) right = right && cut.workers <= early && most - least <= 1;
          if (!right) return printf("tiles %%d resident %%d late %%d less %%d\n", tiles, resident, late, less), 1;
        }
  printf("%%ld %%ld\n", cuts, late_cuts);
}
"""


@pytest.mark.skipif(not AVAILABLE, reason="needs g++")
def test_every_cut(tmp_path):
    """Whoever begins late has so many tiles less, to one; nobody has none; a tile's worker is found."""
    source = find("sequences.cuh").read_text()
    (cut,) = re.findall(r"^struct Cut \{.*?^\};", source, re.MULTILINE | re.DOTALL)
    (tmp_path / "cut.cc").write_text(CHECK % cut)
    subprocess.run([shutil.which("g++") or "g++", "-std=c++17", "-O1", "cut.cc", "-o", "cut"], cwd=tmp_path, check=True)
    done = subprocess.run([tmp_path / "cut"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    cuts, late = map(int, done.stdout.split())
    assert cuts == 14 * 15 // 2 * 7 * 120 and late > cuts / 2


@runs
@pytest.mark.parametrize(
    "heads, multiprocessors, late, less, arguments",
    [
        (16, 7, 4, 6, dict(lens=(900, 3, 700, 40), counts=(1, 1, 1, 1))),  # with tiles for all
        (16, 7, 4, 6, dict(lens=LENS, counts=(1, 1, 1, 1))),  # with fewer than keep those that begin at once busy
        (8, 7, 4, 6, dict(lens=(300, 1100, 2, 64), counts=(2, 1, 1, 2), window=500)),
    ],
)
def test_copies_beside_pages(heads, multiprocessors, late, less, arguments, monkeypatch, tmp_path):
    call, want = with_copies("levels4", heads, **arguments)
    monkeypatch.setattr(hopper.launch, "multiprocessors", lambda index: multiprocessors)
    plan = hopper.Plan(call, multiprocessors)
    assert plan.late == (late * plan.main.config.workers, less)
    assert plan.parts[1].decode_grid[0] == 4 and plan.main.decode_grid == (multiprocessors, 1, 1)
    run(monkeypatch, tmp_path, call, multiprocessors)
    check(call, want)


def test_who_begins_late():
    """Workers of pages, where copies are read by some multiprocessors; none where that is nobody, or everybody, or one source of keys."""
    call, _ = with_copies("int4", 16, LENS, (1, 1, 1, 1))
    one = batch_of("int4", 16)[0]
    many = replace(call, q=call.q.repeat(1, 8, 1), out=None, lse=None)  # whose heads take several blocks of every worker
    assert [hopper.Plan(c, 132).late for c in (call, one, many)] == [(0, 0)] * 3
    assert hopper.Plan(call, 4).late == (0, 0) and hopper.Plan(call, 5).late[0] > 0
    assert torch.equal(call.batch.seq_lens.cpu(), torch.tensor(LENS, dtype=torch.int32))
