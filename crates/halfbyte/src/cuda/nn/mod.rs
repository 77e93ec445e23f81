//! What stands between the products of a language model, and the convolutions of a network, on a GPU; and products of dense
//! weights.
//!
//! The residual stream, and what products leave, is f32; what products read has the type of the caller's choice; sums are
//! f32. Matrices are row-major. Each output is computed in one order: the same input gives the same bits. NaN goes in and
//! comes out. Positions and tokens are read from device memory, so that a step recorded in a graph serves every position.
//!
//! An operation is a `.cu` and the `.rs` that launches it, of one name. Every launch goes into the stream that is handed
//! in and needs no other memory than it is handed.

mod add;
mod argmax;
mod assign;
mod attention;
mod attention_mma;
mod attention_wgmma;
mod collectives;
mod columns;
mod dense;
mod dense_rows_sm90;
mod dense_tf32;
mod embed;
mod expert_layer;
mod experts;
mod experts_gemv;
mod flash_decoding;
mod flash_decoding_sm90;
mod floats;
mod gate;
mod host_tokens;
mod kv_cache;
mod layer_norm;
mod mean;
mod persistent_decode;
mod persistent_layers;
mod persistent_model;
mod persistent_plan;
mod persistent_samples;
mod rms_norm;
mod rope;
mod sample;
mod soft_cap;

pub use add::{add, add_codes, add_to};
pub use argmax::{Step, argmax};
pub use assign::{Assignment, Deal};
pub use attention::{
    Append, Attention, AttentionWorkspace, FEW_QUERIES, Kernels, LARGEST_HEAD, PAGE_LENGTH, PART_LENGTH, Rows, appends,
    attention, attention_kernel,
};
pub use collectives::{Collectives, Mailbox, Neighbours, Update};
pub use columns::columns;
pub use dense::{Call as DenseCall, Dense};
pub use embed::{Table, embed};
pub use expert_layer::{ExpertLayer, ExpertRoom};
pub use experts::{combine_experts, gather, route};
pub use experts_gemv::{ChosenRows, ExpertWeight, ExpertsGemv};
pub use floats::FloatBuffer;
pub use gate::{Gate, gate, gate_quantized};
pub use host_tokens::{HostTokens, TokenPlaces};
pub use kv_cache::{KvCache, KvView};
pub use layer_norm::LayerNorm;
pub use mean::{mean, mean_codes};
pub use persistent_decode::{PersistentDecode, StepOfText};
pub use persistent_layers::{PersistentLayers, StepExperts, StepLayer, StepMlp, StepProduct, StreamNorm};
pub use persistent_plan::{PRODUCTS, Plan as PersistentPlan, Sizes as StepSizes};
pub use rms_norm::{Norm, QuantizedNorm, rms_norm, rms_norm_in_place, rms_norm_quantized};
pub use rope::{HeadNorms, NewRows, Rope};
pub use sample::{Draw, Drawn, sample};
pub use soft_cap::soft_cap;

use super::Gpu;
use super::driver::Launch;
use super::matmul::QuantizedForm;
use super::sources::{Arch, Instance};
use crate::checks::{rows_of, same_length};
use crate::error::{Error, Result};
use crate::kernel::KvType;

/// Blocks of a launch in its first direction, at most.
const MOST_BLOCKS: usize = i32::MAX as usize;
/// And in the others.
const MOST_BLOCKS_ACROSS: usize = 65_535;

/// Every kernel that a model with heads of this size and Llama's steps runs on a processor, but for [`quantized_instances`] and [`instances_of_attention`], with keys and values of one
/// of these types; without a size, those of other networks too, and enough that nothing in the sources is left out.
pub fn instances(arch: Arch, head_size: Option<usize>, kv: &[KvType]) -> Vec<Instance> {
    let heads = head_size.map_or_else(|| vec![64, LARGEST_HEAD], |size| vec![size]);
    let mut all =
        vec![embed::instance(), gate::instance(), argmax::instance(), sample::instance(), columns::instance()];
    if head_size.is_none() {
        all.extend([rms_norm::quantized_instances(), gate::quantized_instances()].concat());
        all.extend([add::instances(), mean::instances()].concat());
        all.extend(instances_of_some_models(arch, None, kv));
        all.extend(instances_of_ranks());
    }
    all.extend(rms_norm::instances());
    all.extend([rope::instances(), attention::combines()].concat());
    all.extend(heads.iter().copied().flat_map(attention::instances));
    let heads = head_size.map_or_else(|| vec![64, 80, 128, LARGEST_HEAD], |size| vec![size]);
    if head_size.is_none() {
        all.extend(heads.iter().flat_map(|&size| attention_mma::instances(arch, size, kv, false)));
    }
    for size in heads {
        let of_hopper = flash_decoding_sm90::instances(arch, size, kv);
        // A model has one type, for which one of the two is.
        if of_hopper.is_empty() || head_size.is_none() {
            all.extend(flash_decoding::instances(arch, size, kv));
        }
        all.extend(of_hopper);
    }
    all.extend(dense::instances(arch, false));
    if head_size.is_none() {
        all.extend(dense::instances(arch, true));
    }
    all
}

/// Kernels that models with more than Llama's steps run besides, with heads of this size, and keys and values of one of these types; without
/// a size, enough that nothing in the sources is left out.
pub fn instances_of_some_models(arch: Arch, head_size: Option<usize>, kv: &[KvType]) -> Vec<Instance> {
    let mut all = vec![soft_cap::instance()];
    all.extend(layer_norm::instances());
    all.extend(experts::instances());
    if head_size.is_some() {
        // The sum of a residual and an update.
        all.extend(add::instances());
    }
    if head_size.is_none() {
        all.extend([64, LARGEST_HEAD].into_iter().flat_map(|size| attention_mma::instances(arch, size, kv, true)));
    }
    all
}

/// Kernels of attention of many rows that a processor runs for heads of this size; `changed`: of models with caps, slopes or sinks.
pub fn instances_of_attention(arch: Arch, head_size: usize, kv: KvType, changed: bool) -> Vec<Instance> {
    let of_hopper = attention_wgmma::instances(head_size, &[kv], changed);
    if arch.is_hopper() && !of_hopper.is_empty() {
        of_hopper
    } else {
        attention_mma::instances(arch, head_size, &[kv], changed)
    }
}

/// Kernels that ranks which share a model run besides.
pub fn instances_of_ranks() -> Vec<Instance> {
    let norms = [rms_norm::summing_instances(), layer_norm::summing_instances()].concat();
    collectives::instances().into_iter().chain(norms).collect()
}

/// Kernels of experts that are compiled for a model's format, for some.
pub fn instances_of_experts(arch: Arch) -> Vec<Instance> {
    let mut all = experts_gemv::samples(arch);
    all.push(assign::instance());
    all
}

/// Kernels that run on Hopper only: for a few models what is compiled for one, and attention with a few sizes of heads.
pub fn instances_of_hopper() -> Vec<Instance> {
    const FLOATS: [KvType; 2] = [KvType::F16, KvType::Bf16];
    let attention = [(64, true), (80, false), (128, false), (128, true), (192, false), (LARGEST_HEAD, true)];
    let attention =
        attention.into_iter().flat_map(|(size, changed)| attention_wgmma::instances(size, &FLOATS, changed));
    persistent_samples::samples().into_iter().chain(attention).collect()
}

/// The kernels that leave quantised rows of a form.
pub fn quantized_instances(form: QuantizedForm) -> [Instance; 2] {
    [rms_norm::quantized_instance(form), gate::quantized_instance(form)]
}

/// Blocks of the cluster that a whole vocabulary is shared out to, as in the sources: what all processors with clusters take.
const BLOCKS_OF_A_CLUSTER: u32 = 8;

/// Threads of a block that has a row of a norm to itself, as in `threads_of_row.cuh`; and those of a row that few others lie beside.
const THREADS_OF_ROW: u32 = 256;
const THREADS_OF_ROW_ALONE: u32 = 1024;

/// Whether more threads work on each of m rows: one row is waited for; many fill the multiprocessors, and short ones leave most
/// threads idle.
fn rows_alone(gpu: &Gpu, m: usize, length: usize) -> bool {
    m <= gpu.caps().multiprocessors as usize && length > 4 * THREADS_OF_ROW as usize
}

/// The form of a launch for m rows of a norm. Error: too many.
fn form_of_rows(gpu: &Gpu, op: &'static str, m: usize, alone: bool) -> Result<Launch> {
    if !alone {
        return Ok(gpu.overlapping(launch(op, [m, 1, 1], THREADS_OF_ROW, 0)?));
    }
    let rows = launch(op, [1, m, 1], 1, 0)?.grid[1];
    let form = cluster(gpu, THREADS_OF_ROW_ALONE, rows);
    Ok(Launch { block: [THREADS_OF_ROW_ALONE / form.grid[0], 1, 1], ..form })
}

/// The form of a launch of one cluster; of one block where the processor has no clusters.
fn cluster(gpu: &Gpu, threads: u32, rows: u32) -> Launch {
    let blocks = if gpu.caps().arch.number >= 90 { BLOCKS_OF_A_CLUSTER } else { 1 };
    gpu.overlapping(Launch { cluster: [blocks, 1, 1], grid: [blocks, rows, 1], ..Launch::linear(blocks, threads) })
}

/// The form of a launch. Error: more blocks than a launch may have.
fn launch(op: &'static str, [x, y, z]: [usize; 3], threads: u32, shared_bytes: u32) -> Result<Launch> {
    if x > MOST_BLOCKS || y > MOST_BLOCKS_ACROSS || z > MOST_BLOCKS_ACROSS {
        let expected = format!("at most {MOST_BLOCKS} × {MOST_BLOCKS_ACROSS} × {MOST_BLOCKS_ACROSS} blocks");
        return Err(Error::invalid(op, expected, format!("{x} × {y} × {z}")));
    }
    let grid = [x as u32, y as u32, z as u32];
    Ok(Launch { grid, shared_bytes, ..Launch::linear(1, threads) })
}

/// Numbers as kernels take them: sizes beyond 32 bits are none that a model has.
fn narrow(op: &'static str, what: &str, value: usize) -> Result<u32> {
    u32::try_from(value).map_err(|_| Error::invalid(op, format!("{what} below 2³²"), value.to_string()))
}
