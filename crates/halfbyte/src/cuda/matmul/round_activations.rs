//! Launches of `round_activations.cu`: rows of x as what their codes of 8 bits stand for, in f32, for groups of any columns.

use super::pack::Packer;
use crate::cuda::Gpu;
use crate::cuda::driver::{Buffer, Launch, Stream, View};
use crate::cuda::parameters::{Parameters, float_type, parameters};
use crate::cuda::sources::{Instance, Source};
use crate::error::Result;
use crate::format::{Act, WeightFormat};
use crate::layout::cuda_wna16::order_of;
use crate::tensor::Float;

static SOURCE: Source = Source {
    path: "matmul/round_activations.cu",
    text: include_str!("round_activations.cu"),
    parameters: &[Params::LAYOUT],
};

/// Groups of a block, as in the source, and threads of each.
const WARPS: u32 = 8;
const LANES: u32 = 32;

/// Blocks along the groups, at most: they take groups in turn.
const MOST_DOWN: u32 = 65_535;

/// Columns of x in groups, on a device.
#[derive(Debug)]
pub(super) struct Groups {
    k: usize,
    group: usize,
    groups: usize,
    /// Columns group by group, and where each group begins; none where columns are in order.
    sorted: Option<[Buffer<u32>; 2]>,
}

impl Groups {
    /// Of the activations that a weight is multiplied by.
    pub(super) fn new(
        packer: &mut Packer<'_>,
        (format, k, groups): (WeightFormat, usize, usize),
        group_index: Option<&[u32]>,
    ) -> Result<Self> {
        let of_x = format.activation_group();
        let index = group_index.filter(|_| of_x == format.group);
        let sorted = match index {
            None => None,
            Some(index) => {
                let mut starts = vec![0u32; groups + 1];
                index.iter().for_each(|&g| starts[g as usize + 1] += 1);
                (0..groups).for_each(|g| starts[g + 1] += starts[g]);
                Some([packer.upload(&order_of(index))?, packer.upload(&starts)?])
            }
        };
        let groups = if sorted.is_some() { groups } else { of_x.count(k) };
        Ok(Self { k, group: of_x.len(k).max(1), groups, sorted })
    }

    pub(super) fn memory(&self) -> impl Iterator<Item = View<'_, u8>> {
        self.sorted.iter().flatten().map(|table| table.view().cast())
    }

    pub(super) fn duplicate(&self, stream: &Stream) -> Result<Self> {
        let copy = |buffers: &[Buffer<u32>; 2]| Ok([buffers[0].duplicate(stream)?, buffers[1].duplicate(stream)?]);
        Ok(Self { sorted: self.sorted.as_ref().map(copy).transpose()?, ..*self })
    }

    /// Puts rows into a stream, from an address of x of some type to an address of f32.
    pub(super) fn round(
        &self,
        gpu: &Gpu,
        stream: &Stream,
        (x, dtype, rows): (u64, Float, usize),
        act: Act,
        rounded: u64,
    ) -> Result<()> {
        if rows * self.groups * self.k == 0 {
            return Ok(());
        }
        let [columns, starts] =
            self.sorted.as_ref().map_or([0; 2], |[columns, starts]| [columns.pointer(), starts.pointer()]);
        let params = Params {
            x,
            rounded,
            columns,
            starts,
            k: self.k as u64,
            group: self.group.min(u32::MAX as usize) as u32,
            groups: self.groups as u32,
            x_type: float_type(dtype),
            padding: 0,
        };
        let launch = form(rows as u32, self.groups as u32);
        let key = ("round_activations", [u32::from(act == Act::A8Asym), 0]);
        gpu.function_once(key, || instance(act))?.launch_typed(stream, &launch, &params, &[])
    }
}

fn form(rows: u32, groups: u32) -> Launch {
    Launch { grid: [rows, groups.div_ceil(WARPS).min(MOST_DOWN), 1], ..Launch::linear(1, WARPS * LANES) }
}

/// What is compiled for such activations.
pub(super) fn instance(act: Act) -> Instance {
    Instance::new(&SOURCE, format!("round_activations<{}>", act == Act::A8Asym))
}

parameters! {
    /// As in the source.
    struct Params {
        x: u64,
        rounded: u64,
        columns: u64,
        starts: u64,
        k: u64,
        group: u32,
        groups: u32,
        x_type: u32,
        padding: u32,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_of_rows_of_any_length_are_one_launch() {
        for (groups, blocks) in [(1, 1), (9, 2), (524_280, 65_535), (524_281, 65_535), (i32::MAX as u32, 65_535)] {
            assert_eq!(form(3, groups).grid, [3, blocks, 1]);
            // A warp's place behind its last group.
            assert!(groups.checked_add(blocks * WARPS).is_some());
        }
    }
}
