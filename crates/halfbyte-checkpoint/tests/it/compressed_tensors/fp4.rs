//! Codes that are floats of 4 bits, against files of compressed-tensors 0.20.0.

use super::*;
use halfbyte_checkpoint::{Conversion, Target, convert, verify};

fn golden(name: &str) -> Checkpoint {
    Checkpoint::open(testdata(&format!("compressed_tensors/{name}.safetensors"))).unwrap()
}

fn tensors(file: &Checkpoint) -> Vec<Tensor> {
    let parts = ["weight_packed", "weight_scale", "weight_global_scale"];
    let present = parts.into_iter().filter(|part| file.contains(part));
    present.map(|part| taken(file, part, &format!("m.{part}"))).collect()
}

/// A config as llm-compressor writes it.
fn declared(format: &str, size: usize, activations: bool) -> String {
    let args = |size| {
        format!(
            r#"{{"num_bits": 4, "type": "float", "symmetric": true, "group_size": {size}, "strategy": "{}"}}"#,
            if size == 16 { "tensor_group" } else { "group" }
        )
    };
    let activations = if activations { args(size) } else { "null".to_owned() };
    format!(
        r#"{{"quantization_config": {{"quant_method": "compressed-tensors", "format": "{format}", "ignore": ["lm_head"],
        "config_groups": {{"group_0": {{"targets": ["Linear"], "format": "{format}", "weights": {},
        "input_activations": {activations}}}}}}}}}"#,
        args(size)
    )
}

#[test]
fn floats_of_four_bits_are_read_to_their_bits() {
    for (name, size, scale) in [("mxfp4", 32, Float::BF16), ("nvfp4", 16, Float::F32)] {
        let (file, config) = (golden(name), declared(&format!("{name}-pack-quantized"), size, false));
        let (q, findings) = load(&tensors(&file), &config);
        assert_eq!(findings, [], "{name}");
        let format =
            WeightFormat { bits: 8, group: Group::Size(size), zero: Zero::Symmetric, scale, channel_scale: None };
        assert_eq!((q.n(), q.k(), q.format()), (24, 192, format), "{name}");
        let want = file.floats("decompressed").unwrap().to_f32();
        // Zeros of either sign are one code.
        let got: Vec<f32> = dequantize(&q).into_iter().map(|v| v as f32).collect();
        assert_eq!(got, want, "{name}");
        // Without a config too, and without the scale of the whole tensor.
        assert_eq!(load(&tensors(&file), ""), (q, Vec::new()), "{name}");
    }
    let mut tensors = tensors(&golden("nvfp4"));
    tensors.retain(|(name, ..)| !name.ends_with("global_scale"));
    let (q, _) = load(&tensors, "");
    assert_eq!(q.format().scale, Float::F16);
    let file = golden("nvfp4");
    let by = f64::from(file.floats("weight_global_scale").unwrap().to_f32()[0]);
    for (got, want) in dequantize(&q).into_iter().zip(file.floats("decompressed").unwrap().to_f32()) {
        assert!((got / by - f64::from(want)).abs() <= f64::from(want).abs() * 1e-7, "{got} and {want}");
    }
}

#[test]
fn they_convert_to_forms_that_hold_their_scales() {
    let dir = tempfile::tempdir().unwrap();
    for (name, size) in [("mxfp4", 32), ("nvfp4", 16)] {
        let [from, native, packed] = ["from", "native", "packed"].map(|end| dir.path().join(format!("{name}-{end}")));
        std::fs::create_dir(&from).unwrap();
        let named: Vec<Tensor> = tensors(&golden(name))
            .into_iter()
            .map(|(part, dtype, shape, data)| (part.replace("m.", "model.layers.0.up_proj."), dtype, shape, data))
            .collect();
        write_folder(&from, &named, &declared(&format!("{name}-pack-quantized"), size, false));
        let weights = Weights::open(&from).unwrap();
        for (target, to) in [(Target::Native, native), (Target::CompressedTensors, packed)] {
            let conversion = Conversion { target, bits: None, group: None, channel_scale: None, requantize: false };
            convert(Job::new(&weights, &to), conversion).unwrap();
            let proof = verify(&weights, &Weights::open(&to).unwrap(), &mut |_, _, _| true).unwrap();
            assert!(proof.equal() && proof.compared > 0, "{name} to {}: {proof:?}", target.name());
        }
    }
}

/// What the config has and the tensors have not, and activations in floats.
#[test]
fn configs_are_compared_with_the_tensors() {
    let file = golden("nvfp4");
    let (_, findings) = load(&tensors(&file), &declared("mxfp4-pack-quantized", 32, false));
    finds(&findings, &["mxfp4-pack-quantized", "groups of 32", "nvfp4-pack-quantized"]);
    let (_, findings) = load(&tensors(&file), &with_groups(r#"{"W4A16": ["Linear"]}"#));
    finds(&findings, &["groups of 128", "nvfp4-pack-quantized"]);
    let dir = tempfile::tempdir().unwrap();
    write_folder(dir.path(), &tensors(&file), &declared("nvfp4-pack-quantized", 16, true));
    let weights = Weights::open(dir.path()).unwrap();
    let findings = weights.findings();
    assert_eq!((findings.len(), findings[0].subject.as_str()), (1, "quantization_config"));
    assert_names(&findings[0].text, &["group_0", "activations in floats of 4 bits", "taken as they are"]);
    let inspection = inspect(&weights).unwrap();
    assert_eq!(
        (inspection.modules[0].scheme, inspection.modules[0].format.as_str()),
        ("compressed-tensors", "w8a16-g16-sf32")
    );
}

#[test]
fn tensors_that_do_not_fit_or_are_no_numbers_are_refused() {
    let of = |name: &str, change: &dyn Fn(&mut Vec<Tensor>)| {
        let mut tensors = tensors(&golden(name));
        change(&mut tensors);
        let error = refusal(&tensors, "");
        let kinds = matches!(error, Error::Malformed { .. } | Error::Missing { .. } | Error::Unsupported { .. });
        assert!(kinds, "{error}");
        error.to_string()
    };
    // Packed codes, scales, the scale of the whole tensor.
    let told = [
        (of("mxfp4", &|t| t[1].3[6 * 3 + 2] = 255), ["m.weight_scale", "got 0xff in row 3, group 2"]),
        (of("nvfp4", &|t| t[1].3[12 * 3 + 2] = 0x7f), ["m.weight_scale", "got 0x7f in row 3, group 2"]),
        (of("nvfp4", &|t| t[1].3[0] = 0xb8), ["m.weight_scale", "got 0xb8 in row 0, group 0"]),
        (of("mxfp4", &|t| t[1].2 = vec![6, 24]), ["m.weight_scale", "as `weight_packed` is [24, 96], got U8 [6, 24]"]),
        (of("mxfp4", &|t| t[1].1 = DType::I8), ["m.weight_scale", "expected U8 (E8M0) or F8_E4M3"]),
        (of("nvfp4", &|t| t[0].2 = vec![2304]), ["m.weight_packed", "a matrix of U8, got U8 [2304]"]),
        (of("nvfp4", &|t| t[2].3.fill(0)), ["m.weight_global_scale", "one number of F32, not 0"]),
        (of("nvfp4", &|t| t[2].3 = f32::NAN.to_le_bytes().to_vec()), ["m.weight_global_scale", "1 are NaN"]),
        (
            of("mxfp4", &|t| t.push(tensor("m.weight_global_scale", DType::F32, &[1], &[1f32]))),
            ["m.weight_global_scale", "none beside scales of E8M0"],
        ),
        (
            of("nvfp4", &|t| t.push(tensor("m.weight_zero_point", DType::I8, &[24, 12], &[0i8; 288]))),
            ["m.weight_zero_point", "are not read"],
        ),
        (of("nvfp4", &|t| drop(t.remove(1))), ["m.weight_scale", "no tensor"]),
    ];
    for (text, parts) in told {
        assert_names(&text, &parts);
    }
}
