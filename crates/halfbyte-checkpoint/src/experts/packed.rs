//! Which tensors are experts in MXFP4, and whether they fit each other.

use super::{Form, GROUP, GROUP_BYTES, MOST_EXPERTS, Misfit, Stack};
use crate::checkpoint::Tensor;
use crate::safetensors::DType;
use std::collections::{BTreeSet, HashMap};

const UP_BLOCKS: &str = "gate_up_proj_blocks";
const UP_SCALES: &str = "gate_up_proj_scales";
const DOWN_BLOCKS: &str = "down_proj_blocks";
const DOWN_SCALES: &str = "down_proj_scales";
const PARTS: [&str; 4] = [UP_BLOCKS, UP_SCALES, DOWN_BLOCKS, DOWN_SCALES];

/// Those of all layers, by the name in front of theirs.
pub(super) fn stacks(tensors: &[Tensor]) -> Result<HashMap<String, Stack>, Misfit> {
    let of_part = |tensor: &'_ Tensor| {
        let (prefix, last) = tensor.name.rsplit_once('.')?;
        (PARTS.contains(&last) && prefix.ends_with(".experts")).then(|| prefix.to_owned())
    };
    let prefixes: BTreeSet<String> = tensors.iter().filter_map(of_part).collect();
    if prefixes.is_empty() {
        return Ok(HashMap::new());
    }
    let by_name: HashMap<&str, &Tensor> = tensors.iter().map(|tensor| (tensor.name.as_str(), tensor)).collect();
    prefixes.into_iter().map(|prefix| stack(&by_name, &prefix).map(|stack| (prefix, stack))).collect()
}

fn stack(by_name: &HashMap<&str, &Tensor>, prefix: &str) -> Result<Stack, Misfit> {
    let name = |part: &str| format!("{prefix}.{part}");
    let find = |part: &str| by_name.get(name(part).as_str()).copied();
    let first_there = PARTS.into_iter().find_map(find);
    let part = |part: &str| {
        find(part).ok_or_else(|| {
            let beside = first_there.map_or("", |tensor| tensor.name.as_str());
            let what = format!("tensor `{}`: expected it beside `{beside}`, found none", name(part));
            Misfit { file: first_there.map_or(0, |tensor| tensor.file), what }
        })
    };
    let misfit = |tensor: &Tensor, expected: &str| Misfit {
        file: tensor.file,
        what: format!("tensor `{}`: expected {expected}, got {} {:?}", tensor.name, tensor.dtype, tensor.shape),
    };
    let up = part(UP_BLOCKS)?;
    let (experts, inner, groups) = match up.shape[..] {
        [experts, rows, groups, GROUP_BYTES]
            if up.dtype == DType::U8
                && (1..=MOST_EXPERTS).contains(&experts)
                && rows > 0
                && rows.is_multiple_of(2 * GROUP)
                && groups > 0 =>
        {
            (experts, rows / 2, groups)
        }
        _ => {
            let expected = format!(
                "U8 [1 to {MOST_EXPERTS} experts, rows of gate and up, a multiple of {}, groups of {GROUP}, {GROUP_BYTES}]",
                2 * GROUP
            );
            return Err(misfit(up, &expected));
        }
    };
    // The tensor's bytes are there, so that none of these is too large.
    let hidden = groups * GROUP;
    for (last, shape) in [
        (UP_SCALES, vec![experts, 2 * inner, groups]),
        (DOWN_BLOCKS, vec![experts, hidden, inner / GROUP, GROUP_BYTES]),
        (DOWN_SCALES, vec![experts, hidden, inner / GROUP]),
    ] {
        let tensor = part(last)?;
        if tensor.dtype != DType::U8 || tensor.shape != shape {
            return Err(misfit(tensor, &format!("U8 {shape:?}, as `{UP_BLOCKS}` is {:?}", up.shape)));
        }
    }
    for (last, shape) in [("gate_up_proj_bias", [experts, 2 * inner]), ("down_proj_bias", [experts, hidden])] {
        if let Some(bias) = find(last).filter(|bias| bias.dtype.float().is_none() || bias.shape != shape) {
            return Err(misfit(bias, &format!("floats {shape:?}, as `{UP_BLOCKS}` is {:?}", up.shape)));
        }
    }
    Ok(Stack { experts, inner, hidden, form: Form::Packed })
}

#[cfg(test)]
mod tests {
    use crate::Checkpoint;
    use crate::safetensors::{DType, TensorSpec, create};

    fn open(tensors: &[(&str, DType, &[usize])]) -> crate::Result<Checkpoint> {
        let dir = tempfile::tempdir().unwrap();
        let spec = |&(name, dtype, shape): &(&str, DType, &[usize])| TensorSpec {
            name: format!("layers.0.mlp.experts.{name}"),
            dtype,
            shape: shape.to_vec(),
        };
        let specs: Vec<_> = tensors.iter().map(spec).collect();
        let mut writer = create(dir.path(), &specs, u64::MAX).unwrap();
        for spec in &specs {
            let bytes = spec.dtype.bytes_of(&spec.shape).unwrap();
            writer.write(&spec.name, &(0..bytes).map(|i| (i / 16) as u8).collect::<Vec<u8>>()).unwrap();
        }
        writer.finish().unwrap();
        Checkpoint::open(dir.path())
    }

    /// 2 experts, 32 inner, 64 hidden.
    const GOOD: [(&str, DType, &[usize]); 6] = [
        ("gate_up_proj_blocks", DType::U8, &[2, 64, 2, 16]),
        ("gate_up_proj_scales", DType::U8, &[2, 64, 2]),
        ("gate_up_proj_bias", DType::F32, &[2, 64]),
        ("down_proj_blocks", DType::U8, &[2, 64, 1, 16]),
        ("down_proj_scales", DType::U8, &[2, 64, 1]),
        ("down_proj_bias", DType::BF16, &[2, 64]),
    ];

    #[test]
    fn rows_of_gate_and_up_in_turn_come_apart() {
        let checkpoint = open(&GOOD).unwrap();
        let bytes = |name: &str| {
            let name = format!("layers.0.mlp.experts.{name}");
            (checkpoint.info(&name).unwrap().shape.to_vec(), checkpoint.data(&name).unwrap().to_vec())
        };
        // A byte is the number of its sixteen: rows of two, 128 an expert.
        let (shape, gate) = bytes("1.gate_proj.weight_blocks");
        assert_eq!(
            (shape, &gate[..33]),
            (vec![32, 32], [[128; 16].as_slice(), &[129; 16], &[132]].concat().as_slice())
        );
        let (_, up) = bytes("0.up_proj.weight_blocks");
        assert_eq!((up[0], up[16], up[32]), (2, 3, 6));
        let (shape, scales) = bytes("1.up_proj.weight_scales");
        assert_eq!((shape, &scales[..9]), (vec![32, 2], [8, 8, 8, 8, 8, 8, 8, 8, 9].as_slice()));
        let (shape, down) = bytes("1.down_proj.weight_blocks");
        assert_eq!((shape, down[0], down[16]), (vec![64, 16], 64, 65));
        assert_eq!(checkpoint.tensor_names().count(), 2 * (3 * 2 + 3));
        // In place, as a part of the file.
        assert!(checkpoint.bytes("layers.0.mlp.experts.1.down_proj.weight_blocks").is_ok());
    }

    #[test]
    fn tensors_that_do_not_fit_each_other_are_named() {
        let told = |tensors: &[(&str, DType, &[usize])], parts: &[&str]| {
            let text = open(tensors).unwrap_err().to_string();
            assert!(parts.iter().all(|part| text.contains(part)), "{text}");
        };
        for (at, shape, expected) in [
            (0, [2usize, 64, 2, 8].as_slice(), "rows of gate and up, a multiple of 64"),
            (0, &[2, 48, 2, 16], "a multiple of 64"),
            (0, &[0, 64, 2, 16], "1 to 4096 experts"),
            (0, &[2, 64, 32], "groups of 32, 16]"),
            (1, &[2, 64, 3], "U8 [2, 64, 2]"),
            (2, &[2, 32], "floats [2, 64]"),
            (3, &[2, 32, 2, 16], "U8 [2, 64, 1, 16]"),
            (4, &[2, 64, 1, 1], "U8 [2, 64, 1]"),
            (5, &[2, 64, 1], "floats [2, 64]"),
        ] {
            let mut tensors = GOOD;
            tensors[at].2 = shape;
            told(&tensors, &[tensors[at].0, expected, &format!("{shape:?}")]);
        }
        let mut tensors = GOOD;
        tensors[4].1 = DType::I8;
        told(&tensors, &["down_proj_scales", "expected U8", "got I8"]);
        for at in [0, 1, 3, 4] {
            let mut tensors = GOOD.to_vec();
            let (name, ..) = tensors.remove(at);
            told(&tensors, &[name, "found none"]);
        }
    }
}
