//! The experts of a layer, from normed rows with their choices to the sum of what their experts leave.
//!
//! ```text
//! few rows:   up with its gate ─ down with the sum of a row's experts       experts_gemv, one kernel; each choice reads its weights
//! others:     assign ─ gather ─ up with its gate ─ down ─ combine_experts   grouped GEMM, all experts in one launch
//! ```

use super::assign::MOST_EXPERTS;
use super::{Assignment, ChosenRows, Deal, ExpertWeight, ExpertsGemv, FloatBuffer, combine_experts, gather};
use crate::cuda::driver::{Buffer, Stream, ViewMut};
use crate::cuda::matmul::{Dealt, Grouped, GroupedCall};
use crate::cuda::sources::Instance;
use crate::cuda::{Caps, Cuda, Gpu};
use crate::error::{Error, Result};
use crate::kernel::Reason;
use crate::tensor::Float;

const OP: &str = "experts";

/// Microseconds that grouped products take besides, in their launches (`docs/decisions/0020-experts-together.md`).
const LAUNCHES: f64 = 12.0;

/// Rows of the smallest tile that a grouped product has.
const LEAST_TILE: usize = 8;

/// Up, with its gate, and down of all experts of a layer. It holds addresses: of the weights, which must outlive it.
#[derive(Debug)]
pub struct ExpertLayer {
    /// For few rows; None: there is no kernel for them.
    few: Option<ExpertsGemv>,
    many: [Grouped; 2],
    experts: usize,
    /// Up to which number of rows each choice reads its expert's weights for itself.
    few_rows: usize,
    top_k: usize,
    x: Float,
    /// Rows of tiles, if not those that are chosen: then grouped products multiply every number of rows.
    given: Option<usize>,
}

/// What passes between the steps of an [`ExpertLayer`], for so many rows of layers alike.
#[derive(Debug)]
pub struct ExpertRoom {
    assignment: Assignment,
    /// Rows, expert by expert.
    gathered: FloatBuffer,
    /// What lies between up and down.
    inner: FloatBuffer,
    /// What experts leave, expert by expert.
    left: Buffer<f32>,
    /// Of few rows, zeros between launches.
    counters: Buffer<u32>,
}

impl ExpertLayer {
    /// Of experts of one shape and format, whose up is packed with its gate; each row chooses `top_k` of them. Or why there is no kernel
    /// for them ([`Grouped::new`]). Errors: memory is short, a bias of another length.
    pub fn new(
        gpu: &Gpu,
        stream: &Stream,
        [up, down]: [&[ExpertWeight<'_>]; 2],
        top_k: usize,
        x: Float,
    ) -> Result<std::result::Result<Self, Reason>> {
        let refuse = |why: &str| Ok(Err(Reason(why.into())));
        if up.len() != down.len() || top_k == 0 || top_k > up.len() || up.len() > MOST_EXPERTS {
            return refuse(
                "takes as many weights of both kinds, up to 722, and no more choices than there are experts",
            );
        }
        if up[0].0.gate().is_none() {
            return refuse("takes experts whose up is packed with its gate");
        }
        let of_up = match Grouped::new(gpu, stream, up, x)? {
            Ok(product) => product,
            Err(why) => return Ok(Err(why)),
        };
        let of_down = match Grouped::new(gpu, stream, down, x)? {
            Ok(product) => product,
            Err(why) => return Ok(Err(why)),
        };
        if of_down.k() != of_up.outputs() || of_down.outputs() != of_up.k() {
            return refuse("takes weights down that read what those up leave");
        }
        let few = ExpertsGemv::new(gpu, stream, [up, down], top_k, x)?.ok();
        let many = [of_up, of_down];
        let mut layer = Self { few, many, experts: up.len(), few_rows: 0, top_k, x, given: None };
        if let Some(few) = &layer.few {
            let caps = gpu.caps();
            let sooner = |&rows: &usize| few.microseconds(&caps, rows) < LAUNCHES + layer.tiles(&caps, rows).1;
            layer.few_rows = (1..=few.most_rows()).take_while(sooner).count();
        }
        Ok(Ok(layer))
    }

    /// Multiplies every number of rows by grouped products, in tiles of so many rows: for measuring which are best. Error: there are no
    /// such tiles.
    pub fn in_tiles(mut self, rows: usize) -> Result<Self> {
        if let Some(all) = self.many.iter().map(|product| product.tiles()).find(|all| !all.contains(&rows)) {
            return Err(Error::invalid(OP, format!("tiles of {all:?} rows"), rows.to_string()));
        }
        self.given = Some(rows);
        Ok(self)
    }

    /// Elements of a row.
    pub fn k(&self) -> usize {
        self.many[0].k()
    }

    /// What computes a number of rows, if each choice reads its expert's weights for itself.
    fn few(&self, rows: usize) -> Option<&ExpertsGemv> {
        self.few.as_ref().filter(|_| self.given.is_none() && rows <= self.few_rows)
    }

    /// Rows of the tiles of both grouped products, and the microseconds that these are expected to take.
    fn tiles(&self, caps: &Caps, rows: usize) -> ([usize; 2], f64) {
        let dealt = Dealt { rows, weights: self.experts, each: self.top_k };
        let [up, down] = [&self.many[0], &self.many[1]].map(|product| product.tile(caps, dealt));
        ([up.0, down.0], up.1 + down.1)
    }

    /// How rows are dealt out.
    fn deal(&self, gpu: &Gpu, rows: usize) -> Deal {
        Deal {
            experts: self.experts,
            top_k: self.top_k,
            align: self.many.iter().map(Grouped::alignment).max().unwrap_or(1),
            tiles: self.given.map_or_else(|| self.tiles(&gpu.caps(), rows).0, |rows| [rows; 2]),
            direct: rows == 1,
        }
    }

    /// Names of the kernels for a number of rows, in order.
    pub fn kernels(&self, rows: usize) -> &'static [&'static str] {
        match (self.few(rows), rows) {
            (Some(_), _) => &["experts_gemv"],
            (None, 1) => &["assign", "grouped GEMM", "grouped GEMM", "combine_experts"],
            (None, _) => &["assign", "gather", "grouped GEMM", "grouped GEMM", "combine_experts"],
        }
    }

    /// What computes any number of rows, besides kernels of every model.
    pub fn instances(&self, gpu: &Gpu) -> Vec<Instance> {
        let of = |product: &Grouped| product.tiles().iter().map(|&tile| product.instance(&gpu.caps(), tile)).collect();
        let many = self.many.iter().flat_map(|product| -> Vec<Instance> { of(product) });
        self.few.iter().map(ExpertsGemv::instance).chain(many).collect()
    }

    /// Room for so many rows of any of some layers, in a queue whose workspace they take. Errors: no layer, memory is short.
    pub fn room(cuda: &Cuda, layers: &[&Self], rows: usize) -> Result<ExpertRoom> {
        let gpu = cuda.gpu();
        let most = |of: &dyn Fn(&Self) -> usize| layers.iter().map(|layer| of(layer)).max();
        let Some(x) = layers.first().map(|layer| layer.x) else {
            return Err(Error::invalid(OP, "layers with experts", "none"));
        };
        let places = |layer: &Self| layer.deal(gpu, rows).places(rows * layer.top_k);
        // Of every tile: a step that is recorded finds all that it needs.
        let workspace = |layer: &Self| {
            let of = |product: &Grouped| {
                let bytes = |&tile: &usize| product.workspace_bytes(&gpu.caps(), tile, places(layer));
                product.tiles().iter().map(bytes).max().unwrap_or(0)
            };
            layer.many.iter().map(of).max().unwrap_or(0)
        };
        cuda.reserve(most(&workspace).unwrap_or(0))?;
        let size = |of: &dyn Fn(&Self) -> usize| most(&|layer| places(layer) * of(layer)).unwrap_or(0);
        let [choices, experts] =
            [most(&|layer| rows * layer.top_k), most(&|layer| layer.experts)].map(|v| v.unwrap_or(0));
        let align = most(&|layer| layer.deal(gpu, rows).align).unwrap_or(1);
        let mut counters = gpu.context().allocate(ExpertsGemv::counters(rows))?;
        cuda.stream().fill(counters.view_mut(), 0)?;
        Ok(ExpertRoom {
            assignment: Assignment::allocate(gpu, choices, experts, align, [LEAST_TILE; 2])?,
            gathered: FloatBuffer::allocate(gpu, x, size(&Self::k))?,
            inner: FloatBuffer::allocate(gpu, x, size(&|layer| layer.many[1].k()))?,
            left: gpu.context().allocate(size(&Self::k))?,
            counters,
        })
    }

    /// `out[r] = Σ shares[r][i] · expert(ids[r][i], x[r])`.
    ///
    /// *Shapes:* as [`ChosenRows`] says, out `[m, k]`. *Accuracy:* that of the products, of the gate and of the sum. *Errors:* lengths or
    /// types that do not fit, too little room.
    pub fn forward(
        &self,
        cuda: &Cuda,
        ChosenRows { x, ids, shares }: ChosenRows<'_>,
        room: &mut ExpertRoom,
        out: ViewMut<'_, f32>,
    ) -> Result<()> {
        let (gpu, stream, k, width) = (cuda.gpu(), cuda.stream(), self.k(), self.many[1].k());
        let (m, chosen) = (x.len() / k, ids.len());
        if m * k != x.len() || m * self.top_k != chosen || shares.len() != chosen {
            let expected = format!("rows of {k} that choose {} experts each", self.top_k);
            return Err(Error::invalid(OP, expected, format!("{} and {chosen}", x.len())));
        }
        let ExpertRoom { assignment, gathered, inner, left, counters } = room;
        let short = |got: usize| Error::invalid(OP, format!("room for {m} rows"), format!("{got} elements"));
        if let Some(few) = self.few(m) {
            if inner.len() < few.inner(m) || counters.len() < ExpertsGemv::counters(m) {
                return Err(short(inner.len()));
            }
            let between = (inner.view_mut(0..few.inner(m)), counters.view_mut().slice(0..ExpertsGemv::counters(m)));
            return few.forward(gpu, stream, ChosenRows { x, ids, shares }, between, out);
        }
        let deal = self.deal(gpu, m);
        let places = deal.places(chosen);
        if inner.len() < places * width || left.len() < places * k {
            return Err(short(inner.len()));
        }
        assignment.assign(gpu, stream, ids, deal)?;
        if !deal.direct {
            gather(gpu, stream, x, k, assignment.rows(), gathered.view_mut(0..places * k))?;
        }
        let [up, down] = &self.many;
        // `gather` is between.
        let listed = !deal.direct;
        let (list, count) = assignment.list(0);
        let rows = if deal.direct { x } else { gathered.view(0..places * k) };
        let y = inner.view_mut(0..places * width);
        up.forward(cuda, GroupedCall { list, count, listed, tile: deal.tiles[0], x: rows, y })?;
        let (list, count) = assignment.list(1);
        let y = left.view_mut().slice(0..places * k).into();
        let x = inner.view(0..places * width);
        down.forward(cuda, GroupedCall { list, count, listed, tile: deal.tiles[1], x, y })?;
        let left = left.view().slice(0..places * k);
        combine_experts(gpu, stream, left, k, (assignment.places(), shares), out)
    }
}
