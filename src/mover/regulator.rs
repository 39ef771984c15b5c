//! How many bytes class bandwidth may have copied in the next epoch, from what class latency met in the last (EasyIO §4.4,
//! Listing 1). A function of numbers: the channel manager brings them.
//!
//! It differs from the listing in two things. A limit that nobody reached limits nobody: so who is late begins at what was
//! really copied, and not at a height from which many steps down change nothing. And an epoch in which class latency
//! copied nothing hurt nobody: the budget grows again.

/// Between which budgets the regulator moves, and how far at a time, in bytes an epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    pub floor_bytes: u64,
    pub top_bytes: u64,
    pub step_bytes: u64,
}

/// What an epoch brought.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// By how much copies of class latency were faster than their target, in thousandths of it, on average; below 0 they
    /// were late. None where there were none, or nobody knows their target yet.
    pub slack: Option<i64>,
    /// Bytes that class bandwidth copied.
    pub moved: u64,
}

/// From this slack on, in thousandths, there is room for more. (EasyIO leaves its threshold open.)
pub const ROOMY: i64 = 100;

/// The next epoch's budget.
pub fn regulate(budget: u64, seen: Seen, bounds: Bounds) -> u64 {
    let Bounds { floor_bytes, top_bytes, step_bytes } = bounds;
    let next = match seen.slack {
        Some(slack) if slack < 0 => budget.min(seen.moved).saturating_sub(step_bytes),
        Some(slack) if slack <= ROOMY => budget,
        Some(_) | None => budget.saturating_add(step_bytes),
    };
    next.min(top_bytes).max(floor_bytes)
}

/// The budget after so many epochs in which nothing was seen.
pub fn idle(budget: u64, epochs: u64, bounds: Bounds) -> u64 {
    let grown = budget.saturating_add(epochs.saturating_mul(bounds.step_bytes));
    grown.min(bounds.top_bytes).max(bounds.floor_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOUNDS: Bounds = Bounds { floor_bytes: 10, top_bytes: 100, step_bytes: 7 };

    fn next(budget: u64, slack: impl Into<Option<i64>>, moved: u64) -> u64 {
        regulate(budget, Seen { slack: slack.into(), moved }, BOUNDS)
    }

    #[test]
    fn down_when_late_up_when_there_is_room_else_as_it_is() {
        for (budget, slack, moved, expect) in [
            // Late: a step down from what was used, were it a hair.
            (50, Some(-1), 50, 43),
            (50, Some(-3000), 60, 43),
            (50, Some(-1), 30, 23),
            // In time, and no more than that.
            (50, Some(0), 50, 50),
            (50, Some(ROOMY), 0, 50),
            // Room, or nobody who could be hurt.
            (50, Some(ROOMY + 1), 50, 57),
            (50, None, 50, 57),
            // Never below the floor,
            (12, Some(-1), 12, 10),
            (10, Some(-1), 0, 10),
            (0, Some(0), 0, 10),
            // and never above the top.
            (97, Some(900), 97, 100),
            (100, None, 100, 100),
            (u64::MAX, None, 0, 100),
            (u64::MAX, Some(0), 0, 100),
        ] {
            assert_eq!(next(budget, slack, moved), expect, "{budget} {slack:?} {moved}");
        }
    }

    #[test]
    fn whatever_comes_the_budget_stays_between_its_bounds() {
        let (mut budget, mut chance) = (50, 1u64);
        for _ in 0..10_000 {
            chance = chance.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let slack = ((chance >> 60) > 3).then_some((chance >> 32) as i64 % 2000 - 1000);
            let before = budget;
            budget = next(budget, slack, chance >> 57);
            assert!((10..=100).contains(&budget));
            assert!(budget <= before + 7, "one step at a time");
        }
    }

    #[test]
    fn late_for_ever_ends_at_the_floor_and_back_in_time_at_the_top() {
        let mut budget = 100;
        for _ in 0..20 {
            budget = next(budget, -500, budget);
        }
        assert_eq!(budget, 10);
        for _ in 0..13 {
            budget = next(budget, 500, budget);
        }
        assert_eq!(budget, 100);
    }

    #[test]
    fn epochs_without_anybody_count_at_once() {
        assert_eq!(idle(50, 0, BOUNDS), 50);
        assert_eq!(idle(50, 3, BOUNDS), 71);
        assert_eq!(idle(50, u64::MAX, BOUNDS), 100);
        assert_eq!(idle(0, 0, BOUNDS), 10);
        let one_by_one = (0..5).fold(20, |budget, _| next(budget, None, 0));
        assert_eq!(idle(20, 5, BOUNDS), one_by_one);
    }
}
