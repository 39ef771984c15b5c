//! What a measure reports: every run, their mean and deviation, and the JSON document of it.
//!
//! No run is dropped, and what was subtracted stands beside what it was subtracted from. A run below the noise may
//! come out negative: cut off at zero it would make the mean of the others wrong.

use serde::Serialize;

use super::bytes::Counted;
use super::load::CpuTimes;
use super::{CostOptions, IDLE_BUSY_MAX};

const GIB: f64 = (1u64 << 30) as f64;
/// So much less than the command's own processes used may be left, as a share of it or in seconds, before a run is
/// doubted.
const ASIDE_SHARE_MAX: f64 = 0.1;
const ASIDE_S_MAX: f64 = 0.05;

#[derive(Serialize)]
pub struct Report {
    /// Program and arguments, as text.
    pub command: Vec<String>,
    pub machine: Where,
    /// Null where `--idle 0` left it out.
    pub idle: Option<Idle>,
    pub runs: Vec<Run>,
    pub summary: Summary,
    /// "rapl" or "meter"; null where there is neither.
    pub energy_from: Option<&'static str>,
    /// Why there are no joules.
    pub energy_note: Option<String>,
    /// How to give bytes, where none are known.
    pub bytes_note: Option<&'static str>,
    /// Reasons to doubt the result.
    pub warnings: Vec<String>,
}

#[derive(Serialize)]
pub struct Where {
    pub cpu: String,
    pub cpus: usize,
    pub kernel: String,
}

/// The machine before the first run.
#[derive(Serialize)]
pub struct Idle {
    pub seconds: f64,
    /// CPU seconds in each second, all processors together: what is subtracted.
    pub cpu_s_per_s: f64,
    /// The same as a share of all processors.
    pub busy_share: f64,
    /// As `cpu_s_per_s`, summed over processes.
    pub processes_cpu_s_per_s: f64,
    pub steal_s_per_s: f64,
    /// Null without an energy source. Not subtracted.
    pub watts: Option<f64>,
    /// The share is so low that the subtraction can be trusted.
    pub quiet: bool,
}

/// One run of the command. CPU seconds are of all processors unless the name says otherwise.
#[derive(Serialize)]
pub struct Run {
    pub wall_s: f64,
    pub cpu_s: f64,
    /// Idle rate times wall time.
    pub noise_s: f64,
    /// `cpu_s` less `noise_s`.
    pub net_cpu_s: f64,
    /// What the command's own processes used, by their own account.
    pub own_cpu_s: f64,
    /// `own_cpu_s` and what all other processes used meanwhile, less the noise by the same count: each by the scheduler's
    /// clock, which misses nothing. Without interrupts, and processes of others that ended.
    pub processes_cpu_s: f64,
    /// `net_cpu_s` less `own_cpu_s`: kernel threads, servers, interrupts, and what the clocks' steps lose.
    pub elsewhere_cpu_s: f64,
    pub steal_s: f64,
    pub bytes: Option<u64>,
    /// "option", "fio", "pool" or "block".
    pub bytes_from: Option<&'static str>,
    pub cpu_s_per_gib: Option<f64>,
    pub processes_cpu_s_per_gib: Option<f64>,
    pub gib_per_s: Option<f64>,
    pub joules: Option<f64>,
    pub joules_per_gib: Option<f64>,
}

/// CPU time between two readings.
#[derive(Clone, Copy)]
pub struct Spent {
    pub times: CpuTimes,
    pub processes_s: f64,
}

/// Over all runs; null where a run lacks the number.
#[derive(Serialize, Default)]
pub struct Summary {
    pub wall_s: Option<Spread>,
    pub net_cpu_s: Option<Spread>,
    pub own_cpu_s: Option<Spread>,
    pub elsewhere_cpu_s: Option<Spread>,
    pub processes_cpu_s: Option<Spread>,
    pub cpu_s_per_gib: Option<Spread>,
    pub processes_cpu_s_per_gib: Option<Spread>,
    pub gib_per_s: Option<Spread>,
    pub joules: Option<Spread>,
    pub joules_per_gib: Option<Spread>,
}

#[derive(Serialize, Clone, Copy, Debug, PartialEq)]
pub struct Spread {
    pub mean: f64,
    /// Standard deviation of the sample; null for one run.
    pub deviation: Option<f64>,
}

impl Idle {
    pub fn of(spent: &Spent, seconds: f64, cpus: usize, joules: Option<f64>) -> Idle {
        let cpu_s_per_s = spent.times.busy_s() / seconds;
        let busy_share = cpu_s_per_s / cpus as f64;
        Idle {
            seconds,
            cpu_s_per_s,
            busy_share,
            processes_cpu_s_per_s: spent.processes_s / seconds,
            steal_s_per_s: spent.times.steal_s() / seconds,
            watts: joules.map(|j| j / seconds),
            quiet: busy_share <= IDLE_BUSY_MAX,
        }
    }

    /// In words, how busy the machine is with other work.
    pub fn loudness(&self) -> String {
        format!(
            "before the first run the machine was {:.1} % busy with other work, more than {:.0} %",
            self.busy_share * 100.0,
            IDLE_BUSY_MAX * 100.0
        )
    }
}

impl Run {
    pub fn of(
        spent: &Spent,
        wall_s: f64,
        own_cpu_s: f64,
        idle: Option<&Idle>,
        moved: Option<Counted>,
        joules: Option<f64>,
    ) -> Run {
        let noise_s = idle.map_or(0.0, |idle| idle.cpu_s_per_s * wall_s);
        let cpu_s = spent.times.busy_s();
        let net_cpu_s = cpu_s - noise_s;
        let processes_cpu_s =
            spent.processes_s - idle.map_or(0.0, |idle| idle.processes_cpu_s_per_s * wall_s);
        let gib = moved.map(|m| m.bytes as f64 / GIB);
        Run {
            wall_s,
            cpu_s,
            noise_s,
            net_cpu_s,
            own_cpu_s,
            elsewhere_cpu_s: net_cpu_s - own_cpu_s,
            processes_cpu_s,
            steal_s: spent.times.steal_s(),
            bytes: moved.map(|m| m.bytes),
            bytes_from: moved.map(|m| m.from),
            cpu_s_per_gib: gib.map(|gib| net_cpu_s / gib),
            processes_cpu_s_per_gib: gib.map(|gib| processes_cpu_s / gib),
            gib_per_s: gib.map(|gib| gib / wall_s),
            joules,
            joules_per_gib: joules.zip(gib).map(|(joules, gib)| joules / gib),
        }
    }
}

impl Run {
    /// The idle rate did not go on during the run: too much was subtracted, by more than the clocks' steps explain.
    fn pushed_others_aside(&self) -> bool {
        self.elsewhere_cpu_s < -(ASIDE_SHARE_MAX * self.own_cpu_s).max(ASIDE_S_MAX)
    }
}

impl Report {
    /// A report without runs yet.
    pub fn new(options: &CostOptions, machine: Where, idle: Option<Idle>) -> Report {
        Report {
            command: options.command.iter().map(|word| word.to_string_lossy().into_owned()).collect(),
            machine,
            idle,
            runs: Vec::new(),
            summary: Summary::default(),
            energy_from: None,
            energy_note: None,
            bytes_note: None,
            warnings: Vec::new(),
        }
    }

    /// Fills in what follows from the runs.
    pub fn finish(&mut self) {
        let over = |number: &dyn Fn(&Run) -> Option<f64>| {
            let numbers: Option<Vec<f64>> = self.runs.iter().map(number).collect();
            Spread::of(&numbers?)
        };
        self.summary = Summary {
            wall_s: over(&|r| Some(r.wall_s)),
            net_cpu_s: over(&|r| Some(r.net_cpu_s)),
            own_cpu_s: over(&|r| Some(r.own_cpu_s)),
            elsewhere_cpu_s: over(&|r| Some(r.elsewhere_cpu_s)),
            processes_cpu_s: over(&|r| Some(r.processes_cpu_s)),
            cpu_s_per_gib: over(&|r| r.cpu_s_per_gib),
            processes_cpu_s_per_gib: over(&|r| r.processes_cpu_s_per_gib),
            gib_per_s: over(&|r| r.gib_per_s),
            joules: over(&|r| r.joules),
            joules_per_gib: over(&|r| r.joules_per_gib),
        };
        if self.runs.iter().any(|r| r.bytes.is_none()) {
            self.bytes_note = Some(
                "not known; give them with --bytes SIZE, --pool POOL or --block DEV, or have fio print its report \
                 (--output-format=json)",
            );
        }
        self.warnings = self.doubts();
    }

    fn doubts(&self) -> Vec<String> {
        let mut doubts = Vec::new();
        match &self.idle {
            Some(idle) if !idle.quiet => doubts.push(idle.loudness()),
            Some(_) => {}
            None => doubts.push("the idle load was not measured, so nothing is subtracted".to_string()),
        }
        if self.runs.iter().any(Run::pushed_others_aside) {
            // On a quiet machine it was not others: work that is over between two of the clock's steps is not counted.
            let (why, exact) = match &self.idle {
                Some(idle) if idle.quiet => (
                    "the kernel counts in steps of 10 ms, and missed shorter work",
                    "own and processes are exact",
                ),
                _ => ("other work was pushed aside while it ran", "own is exact"),
            };
            doubts.push(format!(
                "less is left than the command's own processes used: {why}; the net numbers are too low, {exact}"
            ));
        } else if self.runs.iter().any(|r| r.net_cpu_s < r.noise_s) {
            doubts.push(
                "the noise of a run is more than what is left without it: run longer or on a quieter machine"
                    .to_string(),
            );
        }
        if self.runs.iter().any(|r| r.steal_s > r.wall_s * IDLE_BUSY_MAX) {
            doubts.push("the hypervisor took processors away during a run".to_string());
        }
        doubts
    }
}

impl Spread {
    /// `None` without numbers.
    pub fn of(numbers: &[f64]) -> Option<Spread> {
        let n = numbers.len() as f64;
        let mean = numbers.iter().sum::<f64>() / n;
        let squares: f64 = numbers.iter().map(|x| (x - mean).powi(2)).sum();
        let deviation = (numbers.len() > 1).then(|| (squares / (n - 1.0)).sqrt());
        (!numbers.is_empty()).then_some(Spread { mean, deviation })
    }
}

/// So many ticks, and a tenth of a second more by process.
#[cfg(test)]
fn spent(busy: u64, steal: u64) -> Spent {
    let times = CpuTimes { busy, steal };
    Spent { times, processes_s: times.busy_s() + 0.1 }
}

/// A report of three runs, for the tests of what shows it.
#[cfg(test)]
pub fn sample(with_bytes: bool) -> Report {
    let options = CostOptions {
        command: vec!["dd".into(), "of=<a & b>".into()],
        runs: 3,
        idle: std::time::Duration::from_secs(2),
        bytes: None,
        pool: None,
        block: None,
        meter: None,
        json: false,
        svg: None,
    };
    let machine = Where { cpu: "a processor".into(), cpus: 2, kernel: "6.1".into() };
    let idle = Idle::of(&spent(8, 0), 2.0, 2, None);
    let mut report = Report::new(&options, machine, Some(idle));
    for busy in [200, 250, 300] {
        let moved = with_bytes.then_some(Counted { bytes: 1 << 30, from: "option" });
        report.runs.push(Run::of(&spent(busy, 0), 2.0, 1.5, report.idle.as_ref(), moved, None));
    }
    report.energy_note = Some("not available here: no counters".into());
    report.finish();
    report
}

#[cfg(test)]
mod tests {
    use super::*;

    fn near(a: f64, b: f64) -> bool {
        (a - b).abs() < 1e-9
    }

    #[test]
    fn noise_is_the_idle_rate_for_as_long_as_the_run_took() {
        let report = sample(true);
        let run = &report.runs[0];
        assert!(near(run.noise_s, 0.08) && near(run.net_cpu_s, 1.92) && near(run.elsewhere_cpu_s, 0.42));
        assert!(near(run.cpu_s_per_gib.unwrap(), 1.92) && near(run.gib_per_s.unwrap(), 0.5));
        // By process the noise was 0.18 s in two seconds.
        assert!(near(run.processes_cpu_s, 1.92) && near(run.processes_cpu_s_per_gib.unwrap(), 1.92));
        let idle = report.idle.unwrap();
        assert!(near(idle.cpu_s_per_s, 0.04) && near(idle.busy_share, 0.02) && idle.quiet);
    }

    #[test]
    fn mean_and_sample_deviation() {
        let spread = sample(true).summary.cpu_s_per_gib.unwrap();
        assert!(near(spread.mean, 2.42) && near(spread.deviation.unwrap(), 0.5), "{spread:?}");
        assert_eq!(Spread::of(&[3.0]), Some(Spread { mean: 3.0, deviation: None }));
        assert_eq!(Spread::of(&[]), None);
    }

    #[test]
    fn without_bytes_there_is_no_cost_per_byte() {
        let report = sample(false);
        assert!(report.summary.cpu_s_per_gib.is_none() && report.summary.net_cpu_s.is_some());
        assert!(report.bytes_note.unwrap().contains("--bytes"));
    }

    #[test]
    fn a_busy_machine_and_a_run_below_the_noise_are_said() {
        let mut report = sample(true);
        assert!(report.warnings.is_empty(), "{:?}", report.warnings);
        report.idle = Some(Idle::of(&spent(200, 0), 2.0, 2, None));
        report.runs.push(Run::of(&spent(190, 50), 2.0, 0.1, report.idle.as_ref(), None, None));
        report.finish();
        assert!(near(report.runs[3].net_cpu_s, -0.1));
        for (warning, word) in report.warnings.iter().zip(["50.0 % busy", "pushed aside", "hypervisor"]) {
            assert!(warning.contains(word), "{warning}");
        }
        assert_eq!(report.warnings.len(), 3);
        report.idle = Some(Idle::of(&spent(1, 0), 2.0, 2, None));
        report.finish();
        assert!(report.warnings[0].contains("steps of 10 ms"), "{:?}", report.warnings);
        report.idle = Some(Idle::of(&spent(200, 0), 2.0, 2, None));
        report.runs[3].elsewhere_cpu_s = -0.04;
        report.finish();
        assert!(report.warnings[1].contains("noise of a run"), "{:?}", report.warnings);
    }
}
