//! Experts that a file holds in one tensor, as the linear layers that they are.
//!
//! ```text
//! gate_up_proj [experts, 2·inner, hidden], down_proj [experts, hidden, inner]     rows of gate, then of up
//! gate_up_proj [experts, hidden, 2·inner], down_proj [experts, inner, hidden]     transposed, gate and up in turn, with
//!     gate_up_proj_bias [experts, 2·inner], down_proj_bias [experts, hidden]      biases: GPT-OSS
//! gate_up_proj_blocks u8 [experts, 2·inner, hidden / 32, 16], down_proj_blocks u8 [experts, hidden, inner / 32, 16],
//!     gate_up_proj_scales, down_proj_scales: without the last dimension       codes of MXFP4, rows of gate and up in turn, with
//!                                                                             the same biases: GPT-OSS, too
//! ```
//!
//! `experts.gate_up_proj` becomes `experts.0.gate_proj.weight`, `experts.0.up_proj.weight`, …, `experts.gate_up_proj_blocks`
//! `experts.0.gate_proj.weight_blocks` [inner, hidden / 2], …: views of the same bytes. Tensors of other shapes keep their names, but
//! codes and scales that do not fit each other are refused.

mod packed;

use crate::checkpoint::{MOST_TENSORS, Place, Tensor};
use crate::scheme::mxfp4::{GROUP, GROUP_BYTES};
use std::collections::HashMap;

/// No layer has more experts than this.
const MOST_EXPERTS: usize = 1 << 12;

/// How the experts of a layer lie in its tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stack {
    experts: usize,
    inner: usize,
    hidden: usize,
    form: Form,
}

/// The order of elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    /// Rows of gate, then of up.
    Rows,
    /// Columns are rows, and gate and up lie in turn.
    Transposed,
    /// Rows of gate and up in turn, of codes and scales of MXFP4.
    Packed,
}

/// A tensor that is not as the others of its layer say, by the number of its file, and what was expected of it.
pub(crate) struct Misfit {
    pub file: usize,
    pub what: String,
}

/// A part of each expert in a stacked tensor.
struct Part {
    module: &'static str,
    kind: &'static str,
    /// Of an expert's part.
    shape: Vec<usize>,
    strides: Vec<usize>,
    /// Of its first element, from where the expert begins.
    first: usize,
}

/// The tensors of a checkpoint, with experts apart, or as many of them as show that there are too many. Error: codes and scales that
/// do not fit each other.
pub(crate) fn apart(tensors: Vec<Tensor>) -> Result<Vec<Tensor>, Misfit> {
    let mut stacks = stacks(&tensors);
    stacks.extend(packed::stacks(&tensors)?);
    if stacks.is_empty() {
        return Ok(tensors);
    }
    let mut out = Vec::with_capacity(tensors.len());
    for tensor in tensors {
        if out.len() > MOST_TENSORS {
            break;
        }
        let found = tensor.name.rsplit_once('.').and_then(|(prefix, last)| Some((*stacks.get(prefix)?, prefix, last)));
        let views = found.and_then(|(stack, prefix, last)| stack.views(&tensor, prefix, last));
        match views {
            Some(views) => out.extend(views),
            None => out.push(tensor),
        }
    }
    Ok(out)
}

/// The stacks of all layers, by the name in front of theirs.
fn stacks(tensors: &[Tensor]) -> HashMap<String, Stack> {
    let of_up = tensors.iter().filter_map(|t| t.name.strip_suffix(".gate_up_proj").map(|prefix| (prefix, &t.shape)));
    let of_up: Vec<_> = of_up.filter(|(prefix, shape)| prefix.ends_with(".experts") && shape.len() == 3).collect();
    if of_up.is_empty() {
        return HashMap::new();
    }
    let shapes: HashMap<&str, &[usize]> = tensors.iter().map(|t| (t.name.as_str(), t.shape.as_slice())).collect();
    let stack = |(prefix, up): (&str, &Vec<usize>)| {
        let shape = |last: &str| shapes.get(format!("{prefix}.{last}").as_str()).copied();
        let (&[experts, a, b], &[of_down, c, d]) = (up.as_slice(), shape("down_proj")?) else { return None };
        let fits = experts == of_down && (1..=MOST_EXPERTS).contains(&experts) && ![a, b, c, d].contains(&0);
        let biases = [("gate_up_proj_bias", [experts, b]), ("down_proj_bias", [experts, d])];
        let transposed = biases.iter().all(|(name, of)| shape(name) == Some(of.as_slice()));
        let stack = match transposed {
            true => Stack { experts, inner: c, hidden: a, form: Form::Transposed },
            false => Stack { experts, inner: d, hidden: b, form: Form::Rows },
        };
        let holds = match transposed {
            true => a == d && b == 2 * c,
            false => a == 2 * d && b == c,
        };
        (fits && holds).then(|| (prefix.to_owned(), stack))
    };
    of_up.into_iter().filter_map(stack).collect()
}

impl Stack {
    /// The tensors that are views of this one; None: it is no tensor of the stack.
    fn views(&self, tensor: &Tensor, prefix: &str, last: &str) -> Option<Vec<Tensor>> {
        let Place::Range(range) = &tensor.place else { return None };
        let parts = self.parts(last)?;
        // Those of codes are bytes, which the shapes are told of.
        let of_codes = self.form == Form::Packed && !last.ends_with("_bias");
        let element = if of_codes { 1 } else { tensor.dtype.float()?.size_bytes() };
        let of_expert = range.len() / self.experts;
        let view = |e: usize, part: &Part| {
            let start = range.start + e * of_expert + part.first * element;
            let steps = part.shape.iter().zip(&part.strides).map(|(n, stride)| (n - 1) * stride);
            let (end, bytes) =
                (start + (steps.sum::<usize>() + 1) * element, part.shape.iter().product::<usize>() * element);
            let place = match end - start == bytes && self.form != Form::Transposed {
                true => Place::Range(start..end),
                false => Place::Strided { range: start..end, strides: part.strides.clone(), bytes },
            };
            let name = format!("{prefix}.{e}.{}.{}", part.module, part.kind);
            Tensor { name, dtype: tensor.dtype, shape: part.shape.clone(), file: tensor.file, place }
        };
        Some((0..self.experts).flat_map(|e| parts.iter().map(move |part| (e, part))).map(|(e, p)| view(e, p)).collect())
    }

    /// What of each expert the tensor of this name holds.
    fn parts(&self, last: &str) -> Option<Vec<Part>> {
        let Stack { inner, hidden, form, .. } = *self;
        let part = |module, kind, shape: &[usize], strides: &[usize], first| Part {
            module,
            kind,
            shape: shape.to_vec(),
            strides: strides.to_vec(),
            first,
        };
        // Rows of so many bytes, which each expert has, in turn of gate and up.
        let in_turn = |kind, bytes: usize| {
            let [gate, up] = ["gate_proj", "up_proj"].map(|module| (module, kind));
            let of = |(module, kind), first| part(module, kind, &[inner, bytes], &[2 * bytes, 1], first);
            vec![of(gate, 0), of(up, bytes)]
        };
        let down = |kind, bytes: usize| vec![part("down_proj", kind, &[hidden, bytes], &[bytes, 1], 0)];
        Some(match (last, form) {
            ("gate_up_proj_blocks", Form::Packed) => in_turn("weight_blocks", hidden / GROUP * GROUP_BYTES),
            ("gate_up_proj_scales", Form::Packed) => in_turn("weight_scales", hidden / GROUP),
            ("down_proj_blocks", Form::Packed) => down("weight_blocks", inner / GROUP * GROUP_BYTES),
            ("down_proj_scales", Form::Packed) => down("weight_scales", inner / GROUP),
            ("gate_up_proj", Form::Rows) => vec![
                part("gate_proj", "weight", &[inner, hidden], &[hidden, 1], 0),
                part("up_proj", "weight", &[inner, hidden], &[hidden, 1], inner * hidden),
            ],
            ("down_proj", Form::Rows) => vec![part("down_proj", "weight", &[hidden, inner], &[inner, 1], 0)],
            ("gate_up_proj", Form::Transposed) => vec![
                part("gate_proj", "weight", &[inner, hidden], &[2, 2 * inner], 0),
                part("up_proj", "weight", &[inner, hidden], &[2, 2 * inner], 1),
            ],
            ("gate_up_proj_bias", Form::Transposed | Form::Packed) => {
                vec![part("gate_proj", "bias", &[inner], &[2], 0), part("up_proj", "bias", &[inner], &[2], 1)]
            }
            ("down_proj", Form::Transposed) => vec![part("down_proj", "weight", &[hidden, inner], &[1, hidden], 0)],
            ("down_proj_bias", Form::Transposed | Form::Packed) => vec![part("down_proj", "bias", &[hidden], &[1], 0)],
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use crate::Checkpoint;
    use crate::error::Result;
    use crate::safetensors::{DType, TensorSpec, create};

    fn read(tensors: &[(&str, &[usize])]) -> Checkpoint {
        read_layers(1, tensors).unwrap()
    }

    fn read_layers(layers: usize, tensors: &[(&str, &[usize])]) -> Result<Checkpoint> {
        let dir = tempfile::tempdir().unwrap();
        let named = |layer: usize, (name, shape): &(&str, &[usize])| TensorSpec {
            name: format!("layers.{layer}.mlp.experts.{name}"),
            dtype: DType::F32,
            shape: shape.to_vec(),
        };
        let of_layer = |layer| tensors.iter().map(move |tensor| named(layer, tensor));
        let specs: Vec<_> = (0..layers).flat_map(of_layer).collect();
        let mut writer = create(dir.path(), &specs, u64::MAX).unwrap();
        for spec in &specs {
            let numbers = 0..spec.shape.iter().product::<usize>();
            let bytes: Vec<u8> = numbers.flat_map(|i| (i as f32).to_le_bytes()).collect();
            writer.write(&spec.name, &bytes).unwrap();
        }
        writer.finish().unwrap();
        Checkpoint::open(dir.path())
    }

    /// Few bytes of a file become many tensors.
    #[test]
    fn more_experts_than_all_models_have_are_refused() {
        let [most, layer]: [&[(&str, &[usize])]; 2] = [4096, 8]
            .map(|n| &*vec![("gate_up_proj", &*vec![n, 2, 1].leak()), ("down_proj", &*vec![n, 1, 1].leak())].leak());
        assert_eq!(read_layers(3, layer).unwrap().tensors().count(), 3 * 8 * 3);
        let error = read_layers(44, most).unwrap_err().to_string();
        assert!(error.contains("at most 524288 tensors, those of experts apart"), "{error}");
    }

    fn floats(checkpoint: &Checkpoint, name: &str) -> (Vec<usize>, Vec<f32>) {
        let name = format!("layers.0.mlp.experts.{name}");
        (checkpoint.info(&name).unwrap().shape.to_vec(), checkpoint.floats(&name).unwrap().to_f32())
    }

    #[test]
    fn transposed_experts_with_gate_and_up_in_turn_come_apart() {
        // 2 experts, 3 inner, 2 hidden.
        let checkpoint = read(&[
            ("gate_up_proj", &[2, 2, 6]),
            ("gate_up_proj_bias", &[2, 6]),
            ("down_proj", &[2, 3, 2]),
            ("down_proj_bias", &[2, 2]),
        ]);
        assert_eq!(floats(&checkpoint, "1.gate_proj.weight"), (vec![3, 2], vec![12., 18., 14., 20., 16., 22.]));
        assert_eq!(floats(&checkpoint, "1.up_proj.weight"), (vec![3, 2], vec![13., 19., 15., 21., 17., 23.]));
        assert_eq!(floats(&checkpoint, "1.up_proj.bias"), (vec![3], vec![7., 9., 11.]));
        assert_eq!(floats(&checkpoint, "1.down_proj.weight"), (vec![2, 3], vec![6., 8., 10., 7., 9., 11.]));
        assert_eq!(floats(&checkpoint, "0.down_proj.bias"), (vec![2], vec![0., 1.]));
        assert_eq!(checkpoint.tensor_names().count(), 12);
    }

    #[test]
    fn experts_in_rows_come_apart_in_place_and_other_shapes_stay() {
        let checkpoint = read(&[("gate_up_proj", &[2, 6, 2]), ("down_proj", &[2, 2, 3])]);
        assert_eq!(floats(&checkpoint, "1.up_proj.weight"), (vec![3, 2], vec![18., 19., 20., 21., 22., 23.]));
        assert_eq!(floats(&checkpoint, "1.down_proj.weight"), (vec![2, 3], vec![6., 7., 8., 9., 10., 11.]));
        assert!(checkpoint.bytes("layers.0.mlp.experts.0.gate_proj.weight").is_ok());
        for tensors in [
            [("gate_up_proj", [2, 2, 6].as_slice()), ("down_proj", [2, 3, 2].as_slice())],
            [("gate_up_proj", &[2, 6, 2]), ("down_proj", &[3, 2, 3])],
            [("gate_up_proj", &[2, 0, 2]), ("down_proj", &[2, 2, 0])],
        ] {
            let checkpoint = read(&tensors);
            assert!(checkpoint.contains("layers.0.mlp.experts.gate_up_proj"));
            assert_eq!(checkpoint.tensor_names().count(), 2);
        }
    }
}
