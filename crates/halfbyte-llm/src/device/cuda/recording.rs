//! Steps that were recorded, to be replayed by one launch each.

use crate::error::Result;
use halfbyte::Cuda;
use halfbyte::cuda::driver::Graph;

/// Recordings that are kept, at most.
const MOST: usize = 64;

/// What was recorded for each of some shapes of a step.
#[derive(Debug)]
pub(super) struct Recordings<K> {
    /// Those used last come last.
    kept: Vec<(K, Graph)>,
    /// Shapes of which a step was made, so that every kernel of it is loaded: that cannot be done while one is recorded.
    made: Vec<K>,
}

impl<K> Default for Recordings<K> {
    fn default() -> Self {
        Self { kept: Vec::new(), made: Vec::new() }
    }
}

impl<K: Clone + PartialEq> Recordings<K> {
    /// Makes a step of this shape: the first time as it is, then recorded. `step` uses what outlives the recordings and stays where it
    /// is.
    pub(super) fn run(&mut self, cuda: &Cuda, shape: &K, mut step: impl FnMut() -> Result<()>) -> Result<()> {
        let Self { kept, made } = self;
        if let Some(at) = kept.iter().position(|(known, _)| known == shape) {
            let last = kept.remove(at);
            kept.push(last);
        } else if made.contains(shape) {
            let graph = cuda.stream().capture(|_| step())?;
            made.retain(|known| known != shape);
            kept.push((shape.clone(), graph));
            if kept.len() > MOST {
                kept.remove(0);
            }
        } else {
            step()?;
            made.push(shape.clone());
            if made.len() > MOST {
                made.remove(0);
            }
            return Ok(());
        }
        kept.last().map_or(Ok(()), |(_, graph)| replay(graph, cuda))
    }
}

#[expect(unsafe_code, reason = "what a recording uses is known to those who make it")]
fn replay(graph: &Graph, cuda: &Cuda) -> Result<()> {
    // SAFETY: a recording uses the weights of the model, which outlives it, and the state of the texts beside it, which is allocated
    // once and goes with it; all that uses them is in this stream.
    Ok(unsafe { graph.launch(cuda.stream()) }?)
}
