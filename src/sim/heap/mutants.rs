//! Steps of the heap left out on purpose: whether the simulator would notice. See `sim/mutation.rs`.

use super::run::{Broken, Plan, Start, sequence};
use crate::sim::mutation::{self, Progress, Site, Trial};
use crate::sim::run::Effort;

/// What became of a mutation.
pub type Mutant = mutation::Mutant<Broken>;

/// Leaves out each site that the plan's sequences meet and that is `chosen`, one at a time.
pub fn run(
    plan: &Plan,
    chosen: &dyn Fn(&Site) -> bool,
    progress: Progress<Broken>,
) -> Result<Vec<Mutant>, String> {
    let starts: Vec<Start> = plan.places.iter().map(|p| Start::new(*p)).collect::<Result<_, _>>()?;
    let run = |start: usize, n: u64, effort: &Effort| {
        let (ops, every) = (plan.sequence)(n);
        sequence(&starts[start], &ops, every, effort).1
    };
    // What recovery meets all sequences do: sites are noted without bits that go wrong.
    let trial = Trial { starts: starts.len(), count: plan.count, effort: &plan.effort, flips: 0, run: &run };
    trial.run(plan.threads, chosen, progress)
}
