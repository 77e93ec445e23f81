//! Sizes and memory: weights whose size says nothing about their memory are refused, and memory that is short is an error.

use crate::error::{Error, Result};
use bytemuck::Zeroable;

/// Rows, columns and groups that a weight without elements has at most. Its scales and sums take memory for each of them, so that a
/// shape of a few bytes could ask for more than there is.
pub(crate) const MOST_OF_EMPTY: usize = 1 << 24;

/// Error: no elements, but more than [`MOST_OF_EMPTY`] rows or columns. The caller has compared rows times columns with what is there.
pub(crate) fn check_empty(op: &'static str, [n, k]: [usize; 2]) -> Result<()> {
    if (n == 0 || k == 0) && n.max(k) > MOST_OF_EMPTY {
        let expected = format!("at most {MOST_OF_EMPTY} rows or columns of a weight without elements");
        return Err(Error::invalid(op, expected, format!("{n} × {k}")));
    }
    Ok(())
}

/// Error: more columns than places of them are counted in u32, of which the last marks none.
pub(crate) fn check_columns(op: &'static str, k: usize) -> Result<()> {
    let most = u32::MAX - 1;
    match u32::try_from(k) {
        Ok(k) if k <= most => Ok(()),
        _ => Err(Error::invalid(op, format!("at most {most} columns"), k.to_string())),
    }
}

/// That many zeros. Error: memory is short.
pub(crate) fn zeroed<T: Zeroable>(op: &'static str, len: usize) -> Result<Vec<T>> {
    bytemuck::allocation::try_zeroed_vec(len).map_err(|()| short::<T>(op, len))
}

/// An empty vector with room for that many. Error: memory is short.
pub(crate) fn room<T>(op: &'static str, len: usize) -> Result<Vec<T>> {
    let mut room = Vec::new();
    room.try_reserve_exact(len).map_err(|_| short::<T>(op, len))?;
    Ok(room)
}

/// As many values as are said to come. Error: memory is short.
pub(crate) fn collected<T>(op: &'static str, len: usize, values: impl IntoIterator<Item = T>) -> Result<Vec<T>> {
    let mut all = room(op, len)?;
    all.extend(values);
    Ok(all)
}

/// The error where memory is short for that many elements.
pub(crate) fn short<T>(op: &'static str, len: usize) -> Error {
    Error::Memory { op, requested_bytes: len.saturating_mul(size_of::<T>()) }
}
