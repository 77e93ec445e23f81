//! Launches of `assign.cu`: which rows are whose where experts multiply the rows that chose them.

use super::{launch, narrow};
use crate::cuda::Gpu;
use crate::cuda::driver::{Arg, Buffer, Stream, View};
use crate::cuda::parameters::{Parameters, parameters};
use crate::cuda::sources::{Instance, Source};
use crate::error::{Error, Result};

static SOURCE: Source = Source { path: "nn/assign.cu", text: include_str!("assign.cu"), parameters: &[Params::LAYOUT] };

const OP: &str = "assign";

/// As in the source.
const THREADS: u32 = 512;
const WARPS: usize = 16;

/// Products that read the rows: lists of columns of tiles.
const LISTS: usize = 2;

/// Bytes of shared memory that every processor has.
const MOST_SHARED: usize = 48 << 10;

/// Experts that shared memory counts the rows of.
pub(super) const MOST_EXPERTS: usize = MOST_SHARED / size_of::<u32>() / (WARPS + 1);

pub(super) fn instance() -> Instance {
    Instance::new(&SOURCE, "assign")
}

parameters! {
    /// As in the source.
    struct Params {
        ids: u64,
        rows: u64,
        places: u64,
        lists: [u64; LISTS],
        counts: u64,
        choices: u32,
        experts: u32,
        top_k: u32,
        align: u32,
        capacity: u32,
        tiles: [u32; LISTS],
        direct: u32,
    }
}

/// How choices are dealt out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Deal {
    /// Experts to choose from.
    pub experts: usize,
    /// Those of a row.
    pub top_k: usize,
    /// The places of an expert begin at a multiple of it.
    pub align: usize,
    /// Rows of the tiles of two products.
    pub tiles: [usize; LISTS],
    /// The first product reads the one row that there is, not a copy of it at each place.
    pub direct: bool,
}

impl Deal {
    /// Places that so many choices take at most.
    pub fn places(&self, choices: usize) -> usize {
        choices + (self.align - 1) * choices.min(self.experts)
    }

    /// Columns of tiles, likewise, of each product.
    fn columns(&self, choices: usize) -> [usize; LISTS] {
        self.tiles.map(|tile| choices.min(self.experts) + choices / tile)
    }
}

/// Rows, expert by expert: each expert's lie together, in the order in which they chose it.
#[derive(Debug)]
pub struct Assignment {
    rows: Buffer<u32>,
    places: Buffer<u32>,
    lists: [Buffer<u32>; LISTS],
    counts: Buffer<u32>,
    of: Deal,
    choices: usize,
}

impl Assignment {
    /// Room for so many choices, in tiles of as few rows as `least` says. Error: the device's memory is short.
    pub fn allocate(gpu: &Gpu, choices: usize, experts: usize, align: usize, least: [usize; LISTS]) -> Result<Self> {
        let (context, top_k) = (gpu.context(), 1);
        let of = Deal { experts, top_k, align: align.max(1), tiles: least.map(|tile| tile.max(1)), direct: false };
        let [first, second] = of.columns(choices);
        Ok(Self {
            rows: context.allocate(of.places(choices))?,
            places: context.allocate(choices)?,
            lists: [context.allocate(4 * first)?, context.allocate(4 * second)?],
            counts: context.allocate(LISTS)?,
            of,
            choices: 0,
        })
    }

    /// Deals out the choices of rows, `ids` `[rows, top_k]`.
    ///
    /// *Errors:* more than there is room for, more experts than shared memory counts, tiles of no rows.
    pub fn assign(&mut self, gpu: &Gpu, stream: &Stream, ids: View<'_, u32>, deal: Deal) -> Result<()> {
        let (choices, Deal { experts, top_k, align, tiles, direct }) = (ids.len(), deal);
        if experts == 0 || align == 0 || tiles.contains(&0) || top_k == 0 || !choices.is_multiple_of(top_k) {
            return Err(Error::invalid(OP, "experts, and tiles of rows", format!("{deal:?}")));
        }
        if direct && choices != top_k {
            return Err(Error::invalid(OP, "one row to be read directly", format!("{choices} choices of {top_k}")));
        }
        let columns = deal.columns(choices);
        let fits = deal.places(choices) <= self.rows.len()
            && choices <= self.places.len()
            && columns.iter().zip(&self.lists).all(|(columns, list)| 4 * columns <= list.len());
        if !fits {
            let expected = format!("at most {} choices", self.places.len());
            return Err(Error::invalid(OP, expected, format!("{choices} of {deal:?}")));
        }
        if experts > MOST_EXPERTS {
            return Err(Error::invalid(OP, format!("at most {MOST_EXPERTS} experts"), experts.to_string()));
        }
        let shared = (WARPS + 1) * experts * size_of::<u32>();
        (self.of, self.choices) = (deal, choices);
        if choices == 0 {
            return stream.fill(self.counts.view_mut(), 0);
        }
        let params = Params {
            ids: ids.pointer(),
            rows: self.rows.pointer(),
            places: self.places.pointer(),
            lists: [self.lists[0].pointer(), self.lists[1].pointer()],
            counts: self.counts.pointer(),
            choices: narrow(OP, "choices", choices)?,
            experts: narrow(OP, "experts", experts)?,
            top_k: narrow(OP, "choices", top_k)?,
            align: narrow(OP, "rows", align)?,
            capacity: narrow(OP, "places", deal.places(choices))?,
            tiles: [narrow(OP, "rows", tiles[0])?, narrow(OP, "rows", tiles[1])?],
            direct: direct.into(),
        };
        let form = gpu.overlapping(launch(OP, [1, 1, 1], THREADS, shared as u32)?);
        let function = gpu.function(&instance())?;
        // SAFETY: the one parameter is the source's `Params`; what it writes has room, as was checked above.
        unsafe { function.launch(stream, &form, &[Arg::new(&params)]) }
    }

    /// The row of each place, `[places]`; that of places that no choice has is 0.
    pub fn rows(&self) -> View<'_, u32> {
        self.rows.view().slice(0..self.of.places(self.choices))
    }

    /// The place of each choice, `[rows, top_k]`.
    pub fn places(&self) -> View<'_, u32> {
        self.places.view().slice(0..self.choices)
    }

    /// The columns of tiles of a product, 0 or 1, and how many they are: what [`crate::cuda::matmul::GroupedCall`] takes.
    ///
    /// *Shapes:* `[columns, 4]` as many as there may be, and `[1]`, how many there are. Panics if there is no such product.
    pub fn list(&self, product: usize) -> (View<'_, u32>, View<'_, u32>) {
        let columns = self.of.columns(self.choices)[product];
        (self.lists[product].view().slice(0..4 * columns), self.counts.view().slice(product..product + 1))
    }

    /// Rows of the tiles of a product.
    pub fn tile(&self, product: usize) -> usize {
        self.of.tiles[product]
    }
}
