"""Loops over the host's threads (csrc/graph/parallel.c): each piece once, and threads that the system does not run at once are not waited for again and again."""

import ctypes as C
import threading
import time

from engine import NTHR, PFOR, Services, _piece, lib

lib.om_parallel_for.argtypes = [C.c_void_p, C.c_int64, C.c_int64, _piece, C.c_void_p]


class Pool:
    """Two threads: the caller does the first half, a thread that begins `late` seconds later the other."""

    def __init__(self, late: float):
        self.late, self.together, self.alone = late, 0, 0

        @PFOR
        def parallel_for(_user, n, _grain, fn, arg):
            self.together += 1
            f = _piece(fn)

            def other() -> None:
                time.sleep(self.late)
                f(arg, n // 2, n)

            t = threading.Thread(target=other)
            t.start()
            f(arg, 0, n // 2)
            t.join()

        self.services = Services(parallel_for=parallel_for, num_threads=NTHR(lambda _user: 2))
        self.cx = C.c_void_p(lib.om_ctx_new(C.byref(self.services)))

    def loop(self, work: float) -> None:
        """One loop of two elements, each of which takes `work` seconds."""
        seen: list[tuple[int, int]] = []

        @_piece
        def fn(_arg, begin, end):
            seen.append((begin, end))
            time.sleep(work * (end - begin))

        lib.om_parallel_for(self.cx, 2, 1, fn, None)
        assert sorted(i for b, e in seen for i in range(b, e)) == [0, 1]
        self.alone += len(seen) == 1


def test_late_threads_are_tried_ever_more_rarely():
    failed: list[BaseException] = []

    def body() -> None:  # in a thread of its own, as what is known of delays is
        try:
            pool = Pool(0.004)
            begin = time.monotonic()
            while time.monotonic() - begin < 1 or (pool.together < 3 and time.monotonic() - begin < 30):
                pool.loop(0)
            assert 3 <= pool.together <= 12, pool.together  # after 4 ms, 8 ms, 16 ms, ...
            assert pool.alone > 5 * pool.together
        except BaseException as e:
            failed.append(e)

    t = threading.Thread(target=body)
    t.start()
    t.join()
    assert not failed, failed


class Pace(C.Structure):
    _fields_ = [(name, C.c_int64) for name in ("until", "pause", "lost", "fine")]

    def simulated(self, seconds: float, late: float, loop: float = 50e-6, alone: float = 90e-6, start: int = 0) -> tuple[int, int, int]:
        """Loops one after another, of `loop` seconds with threads that come and `alone` without; how many were tried with threads, how many not, and when it ended."""
        now, together, single = start, 0, 0
        while now < start + seconds * 1e9:
            if now < self.until and (alone - loop) * 1e9 < self.lost:
                now, single = now + int(alone * 1e9), single + 1
            else:
                end = now + int((late or loop) * 1e9)
                lib.om_pace_note(C.byref(self), C.c_int64(now), C.c_int64(end), C.c_int64(int(late * 1e9)))
                now, together = end, together + 1
        return together, single, now


def test_a_free_machine_uses_its_threads():
    p = Pace()
    together, alone, _ = p.simulated(1, 0)
    assert together == 20000 and alone == 0


def test_one_delay_costs_half_of_itself():
    p = Pace()
    lib.om_pace_note(C.byref(p), C.c_int64(0), C.c_int64(4_000_000), C.c_int64(4_000_000))
    _, alone, now = p.simulated(1, 0, start=4_000_000)
    assert 40 <= alone <= 50  # 4 ms of them
    lib.om_pace_note(C.byref(p), C.c_int64(now), C.c_int64(now + 4_000_000), C.c_int64(4_000_000))
    assert p.until == now + 8_000_000  # the next, long after, is a single one as well


def test_a_busy_machine_is_tried_once_a_second():
    p = Pace()
    _, _, now = p.simulated(5, 0.008)
    together, alone, now = p.simulated(10, 0.008, start=now)
    assert 9 <= together <= 11 and alone > 100000
    together, alone, now = p.simulated(3, 0, start=now)  # free again: a last second alone, then with threads
    assert alone < 12000
    together, alone, now = p.simulated(1, 0, start=now)
    assert not alone and p.pause == 0


def test_a_loop_that_wins_more_than_the_delay_keeps_its_threads():
    p = Pace()
    p.simulated(5, 0.008)
    together, alone, _ = p.simulated(5, 0.008, loop=0.05, alone=0.09, start=int(5.1e9))
    assert together and not alone
