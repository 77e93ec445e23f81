//! Raw logits, to compare with other implementations.

use super::{OnProgress, Progress};
use crate::engine::{Model, Session};
use crate::error::{Error, Result};
use halfbyte::cpu::Cpu;

/// Logits of rows of tokens, each row on its own from position 0.
///
/// *Shapes:* ids `[rows, positions]`; `write` is handed `[some positions, vocab]` at a time, in order, so that memory
/// does not hold all of `[rows, positions, vocab]`. *Errors:* negative ids or ids beyond the vocabulary, no positions,
/// more positions than the model's context, whatever `write` returns.
pub fn logits(
    model: &Model,
    cpu: &Cpu,
    ids: &Ids<'_>,
    write: &mut dyn FnMut(&[f32]) -> Result<()>,
    progress: &mut OnProgress<'_>,
) -> Result<()> {
    const OP: &str = "logits";
    let [rows, positions] = ids.shape;
    if rows.checked_mul(positions) != Some(ids.ids.len()) {
        return Err(Error::invalid(OP, format!("{rows} × {positions} ids"), ids.ids.len().to_string()));
    }
    if positions == 0 {
        return Err(Error::EmptyPrompt);
    }
    let mut session = Session::new(model, cpu, positions)?;
    let mut tokens = Vec::with_capacity(positions);
    for (done, row) in ids.ids.chunks_exact(positions).enumerate() {
        tokens.clear();
        for &id in row {
            let refuse =
                |_| Error::Input { op: OP, expected: "token ids of at least 0".to_owned(), got: id.to_string() };
            tokens.push(u32::try_from(id).map_err(refuse)?);
        }
        session.clear()?;
        session.logits_of_all(&tokens, write)?;
        if progress(Progress { done: done + 1, total: rows, perplexity: f64::NAN }).is_break() {
            return Err(Error::Cancelled);
        }
    }
    Ok(())
}

/// Token ids as files hold them.
#[derive(Clone, Copy, Debug)]
pub struct Ids<'a> {
    /// `[rows, positions]`.
    pub ids: &'a [i32],
    /// Rows and positions.
    pub shape: [usize; 2],
}
