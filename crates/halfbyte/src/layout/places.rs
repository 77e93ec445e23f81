//! The order of columns along the tiles of a panel, and the spans that are summed before scaling.

use super::cpu_n16::{FILLER, OP, SPAN_COLUMNS, Span};
use super::stored::StoredTensor;
use crate::error::Result;
use crate::format::Group;
use crate::memory::{collected, room, zeroed};

/// Columns sorted by group, each group from a new tile on.
pub(crate) struct Places {
    /// Tiles along k.
    pub tiles: usize,
    /// Spans in the order of their tiles.
    pub spans: Vec<Span>,
    /// Column of each place, [`FILLER`] for none; None: place p is column p, and filler comes after the last column only.
    pub columns: Option<Vec<u32>>,
}

impl Places {
    /// The order that a tensor's groups ask for in tiles of so many columns. Error: memory is short.
    pub fn of(w: &StoredTensor<'_>, per_tile: usize) -> Result<Self> {
        let (k, groups, group) = (w.k(), w.groups(), w.format().group);
        let members: Vec<Vec<u32>> = match w.group_index() {
            Some(index) => {
                let mut counts = zeroed::<usize>(OP, groups)?;
                index.iter().for_each(|&g| counts[g as usize] += 1);
                let mut members = counts.iter().map(|&count| room(OP, count)).collect::<Result<Vec<_>>>()?;
                index.iter().zip(0..).for_each(|(&g, j)| members[g as usize].push(j));
                members
            }
            None => {
                let size = group.len(k);
                let end =
                    |g: usize| if matches!(group, Group::Size(_)) { k.min(size.saturating_mul(g + 1)) } else { k };
                let members = |g: usize| size * g..end(g);
                let columns = |g: usize| collected(OP, members(g).len(), members(g).map(|j| j as u32));
                (0..groups).map(columns).collect::<Result<_>>()?
            }
        };
        let filled = members.iter().map(|members| members.len().next_multiple_of(per_tile)).sum();
        let (mut columns, mut spans) = (room(OP, filled)?, Vec::new());
        for (group, members) in members.iter().enumerate() {
            let first = columns.len() / per_tile;
            columns.extend_from_slice(members);
            columns.resize(columns.len().next_multiple_of(per_tile), FILLER);
            let end = columns.len() / per_tile;
            for (piece, tile) in (first..end).step_by(SPAN_COLUMNS / per_tile).enumerate() {
                let tiles = (end - tile).min(SPAN_COLUMNS / per_tile);
                let columns = (members.len() - piece * SPAN_COLUMNS).min(SPAN_COLUMNS);
                spans.push(Span { tile, tiles, columns, group });
            }
        }
        let tiles = columns.len() / per_tile;
        let identity = columns.iter().enumerate().all(|(p, &c)| c == p as u32 || (c == FILLER && p >= k));
        Ok(Self { tiles, spans, columns: (!identity).then_some(columns) })
    }
}

/// Rows of several tensors, one below the other: the runs of `rows` that lie in one tensor each, as (tensor, its first row
/// in the run, number of rows).
pub(crate) fn runs(heights: &[usize], rows: std::ops::Range<usize>) -> impl Iterator<Item = (usize, usize, usize)> {
    let mut top = 0;
    heights.iter().enumerate().filter_map(move |(part, &n)| {
        let (from, to) = (rows.start.max(top), rows.end.min(top + n));
        let first = from.saturating_sub(top);
        top += n;
        (from < to).then(|| (part, first, to - from))
    })
}
