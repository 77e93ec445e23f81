//! Launches on a GPU, timed: graphs of many, replayed.

use crate::failure::{Failure, Result};
use crate::interrupt;
use crate::timing::Measured;
use halfbyte::cuda::driver::Stream;

/// Replays that count, and those before them.
const REPLAYS: usize = 15;
const WARM_UP: usize = 2;

/// Seconds that a graph should take at least: starting it is then nothing.
pub const GRAPH_SECONDS: f64 = 400e-6;

/// How often all copies of a weight together must pass the second-level cache, to be cold.
pub const TIMES_L2: usize = 3;

/// Seconds of one of `launches`, which `launch` puts into the stream by their numbers: replays of a graph of all.
pub fn replay(
    stream: &Stream,
    launches: usize,
    mut launch: impl FnMut(&Stream, usize) -> halfbyte::Result<()>,
) -> Result<Measured> {
    if interrupt::cancelled() {
        return Err(Failure::interrupted());
    }
    // What is prepared when it is first used is prepared here, where it may allocate and compile.
    launch(stream, 0)?;
    stream.synchronize()?;
    let all = |stream: &Stream| (0..launches).try_for_each(|i| launch(stream, i));
    let seconds = stream.time_replays(WARM_UP, REPLAYS, all)?;
    Ok(Measured::of(seconds.into_iter().map(|s| s / launches as f64).collect()))
}

/// Seconds that a launch will take, about: to read so many bytes and to do so many operations, on the fastest device there is.
pub fn expected_seconds(bytes: usize, operations: f64) -> f64 {
    (bytes as f64 / 4e12).max(operations / 8e14).max(2e-6)
}
