"""The memory bandwidth, measured by reading much more than any cache holds."""

from lines import Lines


def main(lines):
    from tests.benchmarks.limits import memory_rate

    lines.send(ready=True)
    for _ in lines:
        lines.send(gb_per_s=memory_rate() / 1e9)


if __name__ == "__main__":
    main(Lines())
