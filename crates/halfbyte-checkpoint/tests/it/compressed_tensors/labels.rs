//! Labels that the tensors contradict, and tensors that do not fit.

use super::*;

#[test]
fn what_the_config_gets_wrong_is_found_and_the_tensors_are_followed() {
    let q = four_bits();
    let tensors = pack("m", &q, false);
    let cases: &[(&str, &str, &[&str])] = &[
        (
            "\"num_bits\": 4",
            "\"num_bits\": 8",
            &["the config says 8 bits", "`weight_packed` holds 4", "read as 4 bits"],
        ),
        ("\"group_size\": 32", "\"group_size\": 24", &["groups of 24", "groups of 32", "read as groups of 32"]),
        (r#""group", "group_size": 32"#, r#""channel""#, &["says one scale a channel", "read as groups of 32"]),
        ("\"symmetric\": false", "\"symmetric\": true", &["symmetric, but others are stored", "followed"]),
        ("\"group_size\": 32", "\"group_size\": 32, \"actorder\": \"weight\"", &[]),
    ];
    for (from, to, parts) in cases {
        let (got, findings) = load(&tensors, &config(&FOUR_BITS.replace(from, to)));
        assert_eq!(got, q, "{to}");
        if parts.is_empty() {
            assert_eq!(findings, [], "{to}");
        } else {
            finds(&findings, parts);
        }
    }
    let plain = config(FOUR_BITS);
    let (got, findings) = load(&tensors, &plain.replace("lm_head", "m"));
    assert_eq!(got, q);
    finds(&findings, &["ignore", "read as quantised"]);
    let (got, findings) = load(&tensors, &plain.replace("pack-quantized", "int-quantized"));
    assert_eq!(got, q);
    finds(&findings, &["says int-quantized", "read as pack-quantized"]);
}

#[test]
fn of_several_groups_the_one_that_names_the_module_or_fits_it_counts() {
    let q = four_bits();
    let tensors = pack("m", &q, false);
    let group = |targets: &str, weights: &str| format!(r#"{{"targets": {targets}, "weights": {weights}}}"#);
    let eight = r#"{"num_bits": 8, "strategy": "channel"}"#;
    let both = |first: &str, second: &str| with_groups(&format!(r#"{{"a": {first}, "b": {second}}}"#));
    let pattern = r#"["re:m"]"#;
    let fits = group(pattern, FOUR_BITS);
    assert_eq!(load(&tensors, &both(&group(r#"["Linear"]"#, eight), &fits)), (q.clone(), vec![]));
    assert_eq!(load(&tensors, &both(&fits, &group(pattern, eight))), (q.clone(), vec![]));
    // Named, it is what the config says of the module.
    let (got, findings) = load(&tensors, &both(&fits, &group(r#"["x", "m"]"#, eight)));
    assert_eq!(got, q);
    let texts: Vec<&str> = findings.iter().map(|f| f.text.as_str()).collect();
    assert_eq!(texts.len(), 3, "{texts:?}");
    assert_names(texts[0], &["says 8 bits"]);
    assert_names(texts[1], &["one scale a channel"]);
    assert_names(texts[2], &["symmetric"]);
    // Of two for all layers, the one that fits.
    let linear = |weights: &str| group(r#"["Linear"]"#, weights);
    assert_eq!(load(&tensors, &both(&linear(eight), &linear(FOUR_BITS))), (q.clone(), vec![]));
    // For another module: no group is meant for this one, and the tensors are followed.
    let (got, findings) =
        load(&tensors, &both(&group(r#"["re:.*x", "xm"]"#, FOUR_BITS), &group(r#"["re:mm"]"#, eight)));
    assert_eq!(got, q);
    finds(&findings, &["no group of the config targets it", "read as quantised"]);
}

#[test]
fn presets_are_read_by_their_names() {
    let parsed = |name: &str| {
        let dir = tempfile::tempdir().unwrap();
        let groups = format!(r#"{{"{name}": ["Linear", "re:.*x"]}}"#);
        std::fs::write(dir.path().join("config.json"), with_groups(&groups)).unwrap();
        match read(dir.path()) {
            Ok(Some(QuantizationConfig::CompressedTensors(config))) => Ok(config.groups),
            Ok(other) => panic!("{other:?}"),
            Err(e) => Err(e),
        }
    };
    // Name, bits, symmetric, group, bits of activations: as compressed-tensors 0.20 has them.
    let presets = [
        ("W2A16", 2, true, Some(128), None),
        ("W3A8", 3, true, Some(128), Some(8)),
        ("w4a16", 4, true, Some(128), None),
        ("W4A4", 4, true, Some(128), Some(4)),
        ("W4A16_ASYM", 4, false, Some(128), None),
        ("W4AFP8", 4, true, Some(128), Some(8)),
        ("W8A16", 8, true, Some(128), None),
        ("W8A8", 8, true, None, Some(8)),
        ("INT8", 8, true, None, Some(8)),
    ];
    for (name, bits, symmetric, group, activations) in presets {
        let groups = parsed(name).unwrap();
        let [only] = groups.as_slice() else { panic!("{name}: {groups:?}") };
        let strategy = group.map_or(CompressedTensorsStrategy::Channel, CompressedTensorsStrategy::Group);
        assert_eq!((only.bits, only.symmetric, only.strategy), (bits, symmetric, strategy), "{name}");
        assert_eq!((only.activation_bits, only.name.as_str(), only.act_order), (activations, name, false));
        assert_eq!(only.targets.texts(), ["Linear", "re:.*x"]);
    }
    // Floats of 4 bits are stored as their groups tell.
    for (name, size, activations) in [("NVFP4", 16, Some(4)), ("MXFP4A16", 32, None), ("mxfp4xfp8", 32, Some(8))] {
        let groups = parsed(name).unwrap();
        let [only] = groups.as_slice() else { panic!("{name}: {groups:?}") };
        let format = only.format.unwrap().name();
        let strategy = CompressedTensorsStrategy::Group(size);
        assert_eq!((only.bits, only.strategy, only.activation_bits), (4, strategy, activations), "{name}");
        assert_eq!(format, if size == 16 { "nvfp4-pack-quantized" } else { "mxfp4-pack-quantized" });
    }
    assert_eq!(parsed("UNQUANTIZED").unwrap(), []);
    for (name, parts) in [("MXFP8", ["MXFP8", "preset of floats"]), ("FP8_DYNAMIC", ["FP8_DYNAMIC", "W4A16"])] {
        let error = parsed(name).unwrap_err();
        assert!(matches!(error, Error::Unsupported { .. }), "{error}");
        assert_names(&error.to_string(), &parts);
    }
    // Weights wider than activations are none; nor is an invented name.
    for name in ["W8A4", "W9A16", "group_0"] {
        let error = parsed(name).unwrap_err();
        assert!(matches!(error, Error::Malformed { .. }), "{error}");
        assert_names(&error.to_string(), &["quantization_config.config_groups", &format!("no preset `{name}`")]);
    }
    // The tensors are held against them as against settings.
    let q = four_bits();
    let (got, findings) = load(&pack("m", &q, false), &with_groups(r#"{"W4A16": ["Linear"]}"#));
    assert_eq!(got, q);
    let texts: Vec<&str> = findings.iter().map(|f| f.text.as_str()).collect();
    assert_eq!(texts.len(), 2, "{texts:?}");
    assert_names(texts[0], &["says groups of 128", "groups of 32"]);
    assert_names(texts[1], &["symmetric"]);
}

#[test]
fn tensors_that_do_not_fit_each_other_are_errors_that_name_them() {
    let q = four_bits();
    let replaced = |part: &str, new: Option<Tensor>| {
        let mut tensors = pack("m", &q, false);
        tensors.retain(|t| t.0 != format!("m.{part}"));
        tensors.extend(new);
        tensors
    };
    let i32s = |part: &str, shape: &[usize]| {
        let zeros = vec![0i32; shape.iter().product()];
        replaced(part, Some(tensor(&format!("m.{part}"), DType::I32, shape, &zeros)))
    };
    let shape = |of: &[i64]| replaced("weight_shape", Some(tensor("m.weight_shape", DType::I64, &[of.len()], of)));
    let scales = |shape: &[usize]| {
        let ones = vec![1f32; shape.iter().product()];
        replaced("weight_scale", Some(tensor("m.weight_scale", DType::F32, shape, &ones)))
    };
    let i8s = |shape: &[usize], value: i8| {
        let values = vec![value; shape.iter().product()];
        replaced("weight_zero_point", Some(tensor("m.weight_zero_point", DType::I8, shape, &values)))
    };
    let f64s = tensor("m.weight_scale", DType::F64, &[16, 3], &[1f64; 48]);
    let nan = tensor("m.weight_scale", DType::F32, &[16, 3], &[f32::NAN; 48]);
    let bytes = tensor("m.weight_packed", DType::U8, &[16, 48], &[0u8; 768]);
    let dense = tensor("m.weight", DType::F32, &[16, 96], &[0f32; 1536]);
    let cases: Vec<(Vec<Tensor>, &[&str])> = vec![
        (i32s("weight_packed", &[16, 13]), &["`m.weight_packed`", "96 inputs", "I32 [16, 13]"]),
        (i32s("weight_packed", &[15, 12]), &["`m.weight_shape`", "15 outputs", "[16, 96]"]),
        (i32s("weight_packed", &[16, 0]), &["`m.weight_packed`", "[16, 0]"]),
        (i32s("weight_packed", &[16, 3, 4]), &["`m.weight_packed`", "a matrix of I32", "[16, 3, 4]"]),
        (replaced("weight_packed", Some(bytes)), &["`m.weight_packed`", "a matrix of I32", "U8"]),
        (replaced("weight_shape", None), &["there is no tensor `m.weight_shape`"]),
        (shape(&[16]), &["`m.weight_shape`", "I64 [2]", "[1]"]),
        (shape(&[16, -96]), &["`m.weight_shape`", "neither negative"]),
        (shape(&[16, 0]), &["`m.weight_packed`", "neither dimension 0"]),
        (shape(&[16, i64::MAX]), &["`m.weight_packed`", "inputs"]),
        (shape(&[i64::MAX, 96]), &["`m.weight_shape`", "16 outputs"]),
        (replaced("weight_scale", None), &["there is no tensor `m.weight_scale`"]),
        (scales(&[15, 3]), &["`m.weight_scale`", "[16, groups]", "[15, 3]"]),
        (scales(&[1, 3]), &["`m.weight_scale`", "block", "[1, 3]"]),
        (scales(&[16]), &["`m.weight_scale`", "[16]"]),
        (scales(&[16, 0]), &["`m.weight_scale`", "[16, 0]"]),
        (scales(&[16, 5]), &["`m.weight_scale`", "divides the 96 inputs", "groups of 32", "[16, 5]"]),
        (scales(&[16, 4]), &["`m.weight_zero_point`", "[ceil(16·4 / 32), 4]", "[2, 3]"]),
        (replaced("weight_scale", Some(f64s)), &["`m.weight_scale`", "F16, BF16 or F32", "F64"]),
        (replaced("weight_scale", Some(nan)), &["`m`", "finite", "NaN"]),
        (i32s("weight_zero_point", &[3, 3]), &["`m.weight_zero_point`", "[ceil(16·4 / 32), 3]", "[3, 3]"]),
        (i32s("weight_zero_point", &[2, 2]), &["`m.weight_zero_point`", "[ceil(16·4 / 32), 3]", "[2, 2]"]),
        (i8s(&[16, 1], 0), &["`m.weight_zero_point`", "I8 [16, 3]", "[16, 1]"]),
        (i8s(&[16, 3], 8), &["`m.weight_zero_point`", "from -8 to 7", "8"]),
        (replaced("", Some(dense)), &["module `m`", "either `weight` or `weight_packed`"]),
    ];
    for (tensors, parts) in &cases {
        assert_names(&refusal(tensors, &config(FOUR_BITS)).to_string(), parts);
        refusal(tensors, "");
    }
    // Zero points that are not packed, as older files have them.
    let Zeros::Integer(zeros) = q.zeros() else { panic!() };
    let signed: Vec<i8> = zeros.iter().map(|&z| z as i8 - 8).collect();
    let tensors = replaced("weight_zero_point", Some(tensor("m.weight_zero_point", DType::I8, &[16, 3], &signed)));
    assert_eq!(load(&tensors, &config(FOUR_BITS)), (q.clone(), vec![]));

    let int8 = |scales: &[usize]| {
        let ones = vec![1f32; scales.iter().product()];
        [
            tensor("m.weight", DType::I8, &[4, 8], &[1i8; 32]),
            tensor("m.weight_scale", DType::F32, scales, &ones),
            tensor("m.weight_zero_point", DType::I32, &[1, 1], &[0i32]),
        ]
    };
    assert_names(&refusal(&int8(&[4, 3])[..2], "").to_string(), &["`m.weight_scale`", "divides the 8 inputs"]);
    assert_names(&refusal(&int8(&[8, 1])[..2], "").to_string(), &["`m.weight_scale`", "[4, groups]"]);
    assert_names(&refusal(&int8(&[4, 1]), "").to_string(), &["`m.weight_zero_point`", "I8 [4, 1]", "I32 [1, 1]"]);
}
