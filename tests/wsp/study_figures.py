"""What the study's document says: percentiles and histograms, the claims it is held to, a table, and pictures that need no colour."""

import math
import statistics

SUSPEND_RESUME_MS_MAX = 40
SPREAD_MAX = 1.5
STATE_BYTES_MAX = 1 << 20
SAVE_TIMES_MIN = 50
HIBERNATE_TIMES_MIN = 200
P999_LESS_MIN = 0.9
# Four to each doubling: 19 % from one edge to the next.
BUCKETS_PER_OCTAVE = 4
SLOWEST = 6

# State of the database, what it is called in pictures, its pattern there.
STATES = [
    ("cold", "after a cold boot, nothing read before", "p0"),
    ("resumed", "the first after a resume, all read before", "p1"),
    ("later", "the next after those", "p3"),
    ("rested", "the first after a resume, two seconds on", "p3"),
    ("dram", "memory in DRAM: QEMU's own, anonymous", "p4"),
    ("media", "memory on media: a file on tmpfs (emulated)", "p2"),
    ("disk", "memory on media: a file on a disk's file system", "p5"),
    ("model-dram", "a model: memory takes 80 ns x 40, as DRAM", "p4"),
    ("model-media", "a model: memory takes 300 ns x 40, as Optane", "p2"),
]
STATES_OF = {"database": ("cold", "resumed", "later", "rested"), "memory": ("dram", "media", "disk"), "model": ("model-dram", "model-media")}
ORDERS = [("random", "random reads"), ("seq", "reads in order")]
DOMAINS = {
    "memory": "tmpfs as persistent memory whose caches are lost: lines are written back (emulated)",
    "cpu-cache": "tmpfs as persistent memory whose caches survive: nothing is written back (emulated)",
    "page-cache": "a file on a disk: fdatasync",
}


def percentile(values, share):
    """Nearest rank: of 1000 values the 99.9th is the second largest."""
    return sorted(values)[max(math.ceil(share * len(values) - 1e-9), 1) - 1]


def run_of(latencies_ns):
    """One run's reads, in the document."""
    return {f"{name}_us": percentile(latencies_ns, share) / 1e3 for name, share in
            (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("p999", 0.999), ("max", 1))} | {"first_us": latencies_ns[0] / 1e3}


def slowest(latencies_ns):
    """Which reads they were: the 0th is the first."""
    ranked = sorted(range(len(latencies_ns)), key=lambda n: -latencies_ns[n])
    return [[n, latencies_ns[n] / 1e3] for n in ranked[:SLOWEST]]


def buckets_of(latencies_ns):
    """[from, to, how many], in ns; those that are empty are left out."""
    counts = {}
    for ns in latencies_ns:
        n = math.floor(math.log2(max(ns, 1)) * BUCKETS_PER_OCTAVE)
        counts[n] = counts.get(n, 0) + 1
    edge = lambda n: round(2 ** (n / BUCKETS_PER_OCTAVE), 1)
    return [[edge(n), edge(n + 1), count] for n, count in sorted(counts.items())]


def row_of(order, state, runs_ns, **more):
    """All runs of one kind: medians of each run's percentiles, percentiles of all together, and the histogram."""
    runs = [run_of(run) for run in runs_ns]
    pooled = [ns for run in runs_ns for ns in run]
    medians = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
    return {"order": order, "state": state, "median": medians, "pooled": run_of(pooled), "runs": runs, "buckets": buckets_of(pooled),
            "slowest": [slowest(run) for run in runs_ns]} | more


def rows_by_state(results):
    return {(row["order"], row["state"]): row for part in STATES_OF for row in results.get(part, {}).get("rows", [])}


def spread(rows, what):
    """The slowest median over the fastest, of all sizes with so many processors."""
    by_cpus = {}
    for row in rows:
        by_cpus.setdefault(row["cpus"], []).append(row[what]["median_ms"])
    return max(max(medians) / min(medians) for medians in by_cpus.values())


def claims(results):
    """What it was meant to reach: words, what was found, whether it was."""
    found = []
    if "sizes" in results:
        rows = results["sizes"]
        for what in ("suspends", "resumes"):
            worst = max(row[what]["median_ms"] for row in rows)
            found.append((f"every median of {what} is below {SUSPEND_RESUME_MS_MAX} ms", f"{worst:.1f} ms", worst < SUSPEND_RESUME_MS_MAX))
            wide = spread(rows, what)
            found.append((f"medians of {what} differ by size within {SPREAD_MAX} times", f"{wide:.2f}", wide <= SPREAD_MAX))
        state = max(row["state_bytes"] for row in rows)
        found.append(("the state of devices is below 1 MiB", f"{state >> 10} KiB", state < STATE_BYTES_MAX))
    if "save" in results:
        times = results["save"]["ratio"]
        found.append((f"QEMU's save takes {SAVE_TIMES_MIN} times as long as a suspend", f"{times:.0f}", times >= SAVE_TIMES_MIN))
    if "hibernate" in results:
        times = results["hibernate"]["ratio"]
        found.append((f"hibernate takes {HIBERNATE_TIMES_MIN} times as long as a suspend", f"{times:.0f}", times >= HIBERNATE_TIMES_MIN))
    rows = rows_by_state(results)
    for order, words in ORDERS:
        if (order, "cold") in rows:
            less = 1 - rows[order, "resumed"]["median"]["p999_us"] / rows[order, "cold"]["median"]["p999_us"]
            found.append((f"p99.9 of the first {words} is 90 % below a cold boot's", f"{100 * less:.0f} %", less >= P999_LESS_MIN))
    return [{"claim": claim, "found": what, "held": held} for claim, what, held in found]


def table(results):
    lines = []
    if "sizes" in results:
        lines.append("memory  cpus   suspend: median   worst    resume: median   worst   (ms)   state")
        for row in results["sizes"]:
            s, r = row["suspends"], row["resumes"]
            lines.append(f"{row['ram']:>6}  {row['cpus']:>4}  {s['median_ms']:16.1f} {s['worst_ms']:7.1f} {r['median_ms']:17.1f} {r['worst_ms']:7.1f}"
                         f"       {row['state_bytes'] >> 10:>6} KiB")
    if "dirty" in results:
        lines += ["", "suspend by what the guest dirtied since its resume, ms (of it write-back)"]
        amounts = sorted({row["dirtied_mib"] for row in results["dirty"]})
        lines.append(f"{'MiB':>12}" + "".join(f"{mib:>16}" for mib in amounts))
        for domain in DOMAINS:
            of = {row["dirtied_mib"]: row for row in results["dirty"] if row["domain"] == domain}
            if of:
                cells = (f"{of[mib]['suspend_ms']:.1f} ({of[mib]['write_back_ms']:.1f})" if mib in of else "" for mib in amounts)
                lines.append(f"{domain:>12}" + "".join(f"{cell:>16}" for cell in cells))
    for part, words in (("save", "QEMU's own save to a file"), ("hibernate", "the guest's hibernate")):
        if part in results:
            of = results[part]
            lines += ["", f"{words} ({of['ram']}, {of['touched_mib']} MiB touched, {len(of['rounds'])} rounds, medians)",
                      f"   out: {of['out_ms']:8.0f} ms, our suspend {of['suspend_ms']:6.1f} ms: {of['ratio']:.0f} times as long",
                      f"  back: {of['back_ms']:8.0f} ms, our resume  {of['resume_ms']:6.1f} ms: {of['back_ratio']:.0f} times as long"]
    rows = rows_by_state(results)
    if rows:
        lines += ["", "1000 reads, us: medians of each run's percentiles (nearest rank)",
                  "order   state        runs       p50       p90       p99     p99.9       max     first"]
        for (order, state), row in rows.items():
            m = row["median"]
            lines.append(f"{order:7} {state:11} {len(row['runs']):5} " + " ".join(
                f"{m[key]:9.1f}" for key in ("p50_us", "p90_us", "p99_us", "p999_us", "max_us", "first_us")))
    lines.append("")
    for claim in results["claims"]:
        lines.append(f"{'held' if claim['held'] else 'MISSED':7} {claim['claim']}: {claim['found']}")
    return "\n".join(lines)


def missing(results, parts):
    """What a whole document of these parts has and this one has not."""
    lacks = []

    def wants(what, is_there):
        if not is_there:
            lacks.append(what)

    def positive(*numbers):
        return all(isinstance(number, (int, float)) and 0 < number < math.inf for number in numbers)

    wants("accelerator", results.get("accelerator") in ("kvm", "emulated processor"))
    if "sizes" in parts:
        rows = results.get("sizes", [])
        wants("two sizes", len({row["ram"] for row in rows}) > 1)
        for row in rows:
            for what in ("suspends", "resumes"):
                of = row[what]
                wants(f"{what} of {row['ram']}", positive(of["median_ms"], of["worst_ms"], of["count"]) and of["median_ms"] <= of["worst_ms"])
                wants(f"phases of {what}", len(of["phases_ms"]) == 3)
            wants("bytes of state", positive(row["state_bytes"]))
    if "dirty" in parts:
        rows = results.get("dirty", [])
        wants("all kinds of media by dirtied bytes", {row["domain"] for row in rows} == set(DOMAINS))
        wants("nothing dirtied, and something", {row["dirtied_mib"] > 0 for row in rows} == {True, False})
        wants("suspends by dirtied bytes", all(positive(row["suspend_ms"], row["write_back_ms"], *row["all_ms"]) for row in rows))
    for part in ("save", "hibernate"):
        if part in parts:
            of = results.get(part, {"rounds": []})
            wants(f"rounds of {part}", bool(of["rounds"]))
            for row in of["rounds"]:
                wants(f"both ways of {part}", positive(row["out_ms"], row["back_ms"], row["suspend_ms"], row["resume_ms"]))
    rows = rows_by_state(results)
    for part in STATES_OF:
        for order, state in ((order, state) for order, _ in ORDERS for state in STATES_OF[part] if part in parts):
            row = rows.get((order, state))
            wants(f"{order} reads, {state}", row is not None)
            if row:
                reads = results[part]["reads"]
                wants(f"all of {order} reads, {state}", sum(count for _, _, count in row["buckets"]) == reads * len(row["runs"]) > 0)
                m = row["median"]
                wants(f"percentiles of {order}, {state}", positive(m["p50_us"]) and m["p50_us"] <= m["p99_us"] <= m["p999_us"] <= m["max_us"])
    return lacks


PATTERNS = (
    '<defs><pattern id="p0" width="8" height="8" patternUnits="userSpaceOnUse"><rect width="8" height="8" fill="#dbe6f4"/></pattern>'
    '<pattern id="p1" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)"><rect width="6" height="6" fill="#fff"/>'
    '<rect width="2" height="6" fill="#3d6ea8"/></pattern>'
    '<pattern id="p2" width="8" height="8" patternUnits="userSpaceOnUse"><rect width="8" height="8" fill="#274c77"/></pattern>'
    '<pattern id="p3" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(-45)"><rect width="6" height="6" fill="#fff"/>'
    '<rect width="1" height="6" fill="#3d6ea8"/></pattern>'
    '<pattern id="p4" width="6" height="6" patternUnits="userSpaceOnUse"><rect width="6" height="6" fill="#fff"/>'
    '<circle cx="3" cy="3" r="1.4" fill="#274c77"/></pattern>'
    '<pattern id="p5" width="6" height="6" patternUnits="userSpaceOnUse"><rect width="6" height="6" fill="#fff"/>'
    '<rect width="6" height="2" fill="#3d6ea8"/></pattern></defs>'
)


def sheet(width, height, title):
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="DejaVu Sans, Verdana, sans-serif" font-size="13">',
        PATTERNS, '<rect width="100%" height="100%" fill="#fff"/>', f'<text x="20" y="28" font-size="17">{title}</text>',
    ]


def time_of(us):
    return f"{us:.2g} us" if us < 10 else f"{us:.0f} us" if us < 1000 else f"{us / 1e3:.1f} ms"


def sizes_picture(results):
    """Phases by size (Figures 2 and 3)."""
    rows = [(f"{what[:-1]}, {row['ram']}, {row['cpus']} cpu", row[what]) for what in ("suspends", "resumes") for row in results["sizes"]]
    longest = max(sum(found["phases_ms"].values()) for _, found in rows)
    out = sheet(860, 90 + 26 * len(rows), f"Suspend and resume of whole systems, medians ({results['accelerator']})")
    for n, name in enumerate(("prepare / start", "write-back / load", "finish")):
        out.append(f'<rect x="{20 + 190 * n}" y="42" width="18" height="14" fill="url(#p{n})" stroke="#1a1a1a" stroke-width="0.8"/>')
        out.append(f'<text x="{44 + 190 * n}" y="54" font-size="12">{name}</text>')
    for n, (name, found) in enumerate(rows):
        x, y = 210.0, 76 + 26 * n
        out.append(f'<text x="{x - 10}" y="{y + 14}" text-anchor="end">{name}</text>')
        for phase, ms in enumerate(found["phases_ms"].values()):
            width = 520 * ms / longest
            out.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="18" fill="url(#p{phase})" stroke="#1a1a1a" stroke-width="0.8"/>')
            x += width
        out.append(f'<text x="{x + 8:.1f}" y="{y + 14}">{found["median_ms"]:.1f} ms</text>')
    return "\n".join(out) + "\n</svg>\n"


def database_picture(results):
    """Histograms of latencies, one field for each state of memory and each order (Figure 4)."""
    rows = rows_by_state(results)
    states = [state for state in STATES if any((order, state[0]) in rows for order, _ in ORDERS)]
    wide, high, left, top, row_height = 400, 92, 60, 74, 142
    out = sheet(60 + 2 * (wide + 50), top + row_height * len(states) + 46, f"RocksDB in a guest: latency of 1000 reads ({results['accelerator']})")
    out.append('<text x="20" y="48" font-size="12">dashed: the 99.9th percentile, median of all runs; both axes logarithmic</text>')
    low, decades = 0.1, 6

    def across(us):
        return wide * min(max(math.log10(us / low) / decades, 0), 1)

    for n, (state, words, pattern) in enumerate(states):
        for m, (order, name) in enumerate(ORDERS):
            row = rows.get((order, state))
            if row is None:
                continue
            x0, y0 = left + m * (wide + 50), top + n * row_height + 20
            bottom = y0 + high
            most = math.log10(max(count for _, _, count in row["buckets"])) + 0.3
            out.append(f'<text x="{x0}" y="{y0 - 6}" font-size="12">{name}: {words}</text>')
            for begin, end, count in row["buckets"]:
                x, tall = across(begin / 1e3), high * (math.log10(count) + 0.3) / most
                out.append(f'<rect x="{x0 + x:.1f}" y="{bottom - tall:.1f}" width="{max(across(end / 1e3) - x, 1):.1f}" height="{tall:.1f}" '
                           f'fill="url(#{pattern})" stroke="#1a1a1a" stroke-width="0.6"/>')
            for count in (1, 100, 10000):
                tall = high * (math.log10(count) + 0.3) / most
                if tall <= high:
                    out.append(f'<text x="{x0 - 6}" y="{bottom - tall + 4:.1f}" font-size="10" text-anchor="end">{count}</text>')
            for decade in range(decades + 1):
                x = x0 + wide * decade / decades
                out.append(f'<line x1="{x:.1f}" y1="{bottom}" x2="{x:.1f}" y2="{bottom + 4}" stroke="#1a1a1a"/>')
                label = ("0.1 us", "1 us", "10 us", "0.1 ms", "1 ms", "10 ms", "0.1 s")[decade]
                out.append(f'<text x="{x:.1f}" y="{bottom + 16}" font-size="10" text-anchor="middle">{label}</text>')
            out.append(f'<line x1="{x0}" y1="{bottom}" x2="{x0 + wide}" y2="{bottom}" stroke="#1a1a1a"/>')
            p999 = row["median"]["p999_us"]
            x = x0 + across(p999)
            out.append(f'<line x1="{x:.1f}" y1="{y0}" x2="{x:.1f}" y2="{bottom}" stroke="#1a1a1a" stroke-width="1.6" stroke-dasharray="5 3"/>')
            # On a white ground, for the line may be there.
            for ground in ('stroke="#fff" stroke-width="5"', ""):
                out.append(f'<text x="{x0 + wide}" y="{y0 + 10}" font-size="12" text-anchor="end" {ground}>p99.9 {time_of(p999)}</text>')
    return "\n".join(out) + "\n</svg>\n"


def dirty_picture(results):
    """How long a suspend writes back, by what was dirtied before (Figure 1): the rest of it does not depend on that."""
    wide, high, left, top = 620, 320, 80, 60
    amounts = sorted({row["dirtied_mib"] for row in results["dirty"]})
    times = [row["write_back_ms"] for row in results["dirty"]]
    low, top_decade = math.floor(math.log10(min(times))), math.ceil(math.log10(max(times)))
    out = sheet(left + wide + 40, top + high + 130, f"Write-back at a suspend, by what the guest stored to ({results['accelerator']})")

    def at(mib, ms):
        # Nothing at all has a place of its own on an axis of logarithms.
        step = wide / (len(amounts) - 1) if len(amounts) > 1 else 0
        return left + step * amounts.index(mib), top + high - high * (math.log10(ms) - low) / max(top_decade - low, 1)

    for mib in amounts:
        x, _ = at(mib, 10**low)
        out.append(f'<line x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{top + high}" stroke="#ccc" stroke-width="0.6"/>')
        out.append(f'<text x="{x:.1f}" y="{top + high + 18}" text-anchor="middle">{mib}</text>')
    out.append(f'<text x="{left + wide / 2}" y="{top + high + 38}" text-anchor="middle">MiB stored to since the resume before</text>')
    for decade in range(low, top_decade + 1):
        _, y = at(amounts[0], 10**decade)
        out.append(f'<line x1="{left}" y1="{y:.1f}" x2="{left + wide}" y2="{y:.1f}" stroke="#ccc" stroke-width="0.6"/>')
        out.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{10**decade:g} ms</text>')
    for n, (domain, words) in enumerate(DOMAINS.items()):
        rows = sorted((row for row in results["dirty"] if row["domain"] == domain), key=lambda row: row["dirtied_mib"])
        dash = ("", "7 4", "2 3")[n]
        places = [at(row["dirtied_mib"], row["write_back_ms"]) for row in rows]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        out.append(f'<polyline points="{path}" fill="none" stroke="#1a1a1a" stroke-width="1.6" stroke-dasharray="{dash}"/>')
        x, y = left + 10, top + high + 62 + 22 * n
        out.append(f'<line x1="{x - 20}" y1="{y}" x2="{x + 20}" y2="{y}" stroke="#1a1a1a" stroke-width="1.6" stroke-dasharray="{dash}"/>')
        out.append(f'<text x="{x + 30}" y="{y + 4}" font-size="12">{words}</text>')
        out += [mark(n, *place) for place in [*places, (x, y)]]
    return "\n".join(out) + "\n</svg>\n"


def mark(n, x, y):
    """A circle, a square or a triangle."""
    if n == 0:
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="#1a1a1a"/>'
    if n == 1:
        return f'<rect x="{x - 4.5:.1f}" y="{y - 4.5:.1f}" width="9" height="9" fill="#fff" stroke="#1a1a1a" stroke-width="1.4"/>'
    return f'<path d="M{x:.1f} {y - 6:.1f} l5.5 10 h-11 z" fill="#fff" stroke="#1a1a1a" stroke-width="1.4"/>'


def pictures(results):
    """By the name of their file."""
    drawn = {}
    if "sizes" in results:
        drawn["wsp.svg"] = sizes_picture(results)
    if rows_by_state(results):
        drawn["wsp-database.svg"] = database_picture(results)
    if "dirty" in results:
        drawn["wsp-dirty.svg"] = dirty_picture(results)
    return drawn
