//! Repeated measurements: median and spread.

use crate::failure::{Failure, Result};
use crate::interrupt;
use serde::Serialize;
use std::time::{Duration, Instant};

/// How often something is measured.
#[derive(Clone, Copy, Debug)]
pub struct Effort {
    /// Runs before the first that counts.
    pub warm_up: usize,
    /// At least this many runs, unless `at_most` has passed.
    pub runs: usize,
    /// At least this long.
    pub at_least: Duration,
    /// No further run after this.
    pub at_most: Duration,
    /// Runs that are made however long they take; at least 1.
    pub in_any_case: usize,
}

/// What measurements say.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Measured {
    /// Median, in seconds.
    pub median: f64,
    /// The shortest, in seconds.
    pub least: f64,
    /// Width of the middle eight tenths of the runs, as a share of the median.
    pub spread: f64,
    /// Runs that counted.
    pub runs: usize,
}

impl Measured {
    /// Of seconds.
    pub fn of(mut seconds: Vec<f64>) -> Self {
        seconds.sort_by(f64::total_cmp);
        let at = |share: f64| seconds[((seconds.len() - 1) as f64 * share).round() as usize];
        let middle = seconds.len() / 2;
        let median =
            if seconds.len() % 2 == 1 { seconds[middle] } else { (seconds[middle - 1] + seconds[middle]) / 2.0 };
        Self { median, least: seconds[0], spread: (at(0.9) - at(0.1)) / median, runs: seconds.len() }
    }
}

/// Runs `work`, which is told the number of the run, as often as it takes.
pub fn measure(effort: Effort, mut work: impl FnMut(usize) -> Result<()>) -> Result<Measured> {
    for run in 0..effort.warm_up {
        work(run)?;
    }
    let (begun, mut seconds) = (Instant::now(), Vec::new());
    loop {
        if interrupt::cancelled() {
            return Err(Failure::interrupted());
        }
        let start = Instant::now();
        work(effort.warm_up + seconds.len())?;
        seconds.push(start.elapsed().as_secs_f64());
        let (passed, runs) = (begun.elapsed(), seconds.len());
        if (runs >= effort.runs && passed >= effort.at_least)
            || (runs >= effort.in_any_case.max(1) && passed >= effort.at_most)
        {
            return Ok(Measured::of(seconds));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn median_and_spread_of_known_numbers() {
        let measured = Measured::of((1..=11).rev().map(f64::from).collect());
        assert_eq!((measured.median, measured.least, measured.runs), (6.0, 1.0, 11));
        assert!((measured.spread - 8.0 / 6.0).abs() < 1e-12);
        assert_eq!(Measured::of(vec![4.0, 1.0]).median, 2.5);
    }

    #[test]
    fn runs_at_least_as_often_and_no_longer_than_said() {
        let minute = Duration::from_secs(60);
        let effort = Effort { warm_up: 2, runs: 5, at_least: Duration::ZERO, at_most: minute, in_any_case: 1 };
        let mut numbers = Vec::new();
        let measured = measure(effort, |run| {
            numbers.push(run);
            Ok(())
        });
        assert_eq!(measured.unwrap().runs, 5);
        assert_eq!(numbers, (0..7).collect::<Vec<_>>());
        let effort = Effort { runs: 1000, at_most: Duration::from_millis(1), in_any_case: 3, ..effort };
        let measured = measure(effort, |_| {
            std::thread::sleep(Duration::from_millis(2));
            Ok(())
        });
        assert_eq!(measured.unwrap().runs, 3);
    }
}
