//! Where results go: never over what is read, through links and pipes, and not beyond the shell's limit.

use crate::support::{copy_of_model, fails, halfbyte, json, model, output, quiet, text};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;
use tempfile::TempDir;

/// A safetensors file with one row of three token ids.
fn write_ids(path: &Path) {
    let header = br#"{"input_ids":{"dtype":"I32","shape":[1,3],"data_offsets":[0,12]}}  "#;
    let ids: Vec<u8> = [1i32, 2, 3].iter().flat_map(|id| id.to_le_bytes()).collect();
    fs::write(path, [&(header.len() as u64).to_le_bytes(), &header[..], &ids].concat()).unwrap();
}

#[test]
fn logits_replace_nothing_that_is_read() {
    let here = TempDir::new().unwrap();
    let path = |name: &str| here.path().join(name).display().to_string();
    let copy = copy_of_model(here.path());
    let (folder, ids) = (copy.display().to_string(), path("ids"));
    write_ids(Path::new(&ids));
    let logits = |to: &str| ["eval", "logits", &folder, "--ids", &ids, "-o", to].map(str::to_owned);
    let over = |to: &str| [&logits(to)[..], &["--overwrite".to_owned()]].concat();
    let content = |folder: &Path| {
        let mut files: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
        files.sort();
        files.into_iter().map(|file| (fs::read(&file).unwrap(), file)).collect::<Vec<_>>()
    };
    let before = content(&copy);
    symlink("copy/config.json", path("link")).unwrap();
    fs::hard_link(copy.join("model-00002-of-00002.safetensors"), path("hard")).unwrap();
    for name in ["copy/model-00001-of-00002.safetensors", "copy/tokenizer.json", "copy/../link", "hard", "ids"] {
        let args = over(&path(name));
        let error = fails(2, &args.iter().map(String::as_str).collect::<Vec<_>>());
        assert!(error.contains("no input"), "{name}: {error}");
    }
    assert!(content(&copy) == before);

    // A file, what a link leads to, and a pipe.
    let run = |args: &[String]| quiet(&args.iter().map(String::as_str).collect::<Vec<_>>());
    run(&logits(&path("logits")));
    let wanted = fs::read(path("logits")).unwrap();
    fs::write(path("behind"), "x").unwrap();
    symlink("behind", path("to_behind")).unwrap();
    run(&over(&path("to_behind")));
    assert!(
        fs::read(path("behind")).unwrap() == wanted && fs::symlink_metadata(path("to_behind")).unwrap().is_symlink()
    );
    let args = logits("/dev/stdout");
    let piped = output(&args.iter().map(String::as_str).collect::<Vec<_>>());
    assert_eq!(piped.status.code(), Some(0), "{}", text(&piped.stderr));
    assert!(piped.stdout == wanted && text(&piped.stderr).contains("logits [1, 3, 4096]"));
    assert!(fs::symlink_metadata("/dev/stdout").unwrap().is_symlink());
    let mut left = fs::read_dir(here.path()).unwrap().map(|entry| entry.unwrap().file_name());
    assert!(left.all(|name| !name.to_string_lossy().ends_with(".tmp")));
}

/// A folder is not called as a file of another form is.
#[test]
fn a_form_of_several_files_is_not_written_under_the_name_of_one() {
    let here = TempDir::new().unwrap();
    let path = |name: &str| here.path().join(name).display().to_string();
    let (m, q) = (model(), path("q"));
    quiet(&["quantize", &m, "-o", &q]);
    for args in [
        &["quantize", &m, "-o", &path("a.gguf")][..],
        &["quantize", &m, "-o", &path("a.safetensors"), "--to", "gguf"],
        &["convert", &q, "-o", &path("a.ONNX"), "--to", "onnx"],
        &["dequantize", &q, "-o", &path("a.gguf")],
    ] {
        let error = fails(2, args);
        assert!(error.contains("expected the name of a folder") && error.contains("written as a folder"), "{error}");
        assert_eq!(fs::read_dir(here.path()).unwrap().count(), 1, "{args:?}");
    }
    // What is a folder already may have any name.
    fs::create_dir(path("b.gguf")).unwrap();
    quiet(&["quantize", &m, "-o", &path("b.gguf")]);
}

/// A model is read, and nothing of it replaced, whatever it is called by.
#[test]
fn files_are_called_by_their_names_alone_where_they_lie() {
    let here = TempDir::new().unwrap();
    let path = |name: &str| here.path().join(name).display().to_string();
    quiet(&["quantize", &model(), "-o", &path("onnx"), "--to", "onnx"]);
    quiet(&["quantize", &model(), "-o", &path("gguf/model.gguf"), "--to", "gguf"]);
    quiet(&["quantize", &model(), "-o", &path("native")]);
    let run = |folder: &str, args: &[&str]| {
        let out = halfbyte(args).arg("--quiet").current_dir(here.path().join(folder)).output().unwrap();
        (out.status.code(), text(&out.stderr))
    };
    for (folder, file) in [("gguf", "model.gguf"), ("onnx", "model.onnx"), ("native", "model.safetensors")] {
        let own = format!("../{folder}");
        let before = fs::read(here.path().join(folder).join(file)).unwrap();
        for args in [
            &["convert", file, "-o", &own, "--to", "native", "--overwrite"][..],
            &["dequantize", file, "-o", ".", "--overwrite"],
        ] {
            let (status, error) = run(folder, args);
            let told = error.contains("other than the source") || error.contains("the folder that this runs in");
            assert!(status == Some(2) && told, "{args:?}: {status:?} {error}");
        }
        assert!(fs::read(here.path().join(folder).join(file)).unwrap() == before);
        let to = format!("../of_{folder}");
        assert_eq!(run(folder, &["convert", file, "-o", &to, "--to", "native"]), (Some(0), String::new()), "{file}");
        assert_eq!(json(&["verify", &path(folder), &path(&format!("of_{folder}"))])["equal"], true);
        assert_eq!(
            run(folder, &["dequantize", file, "-o", &format!("{to}_dense")]),
            (Some(0), String::new()),
            "{file}"
        );
    }
    // Files of the source that a link leads to.
    fs::create_dir(path("view")).unwrap();
    for name in ["model.safetensors", "config.json", "tokenizer.json"] {
        symlink(path(&format!("native/{name}")), path(&format!("view/{name}"))).unwrap();
    }
    let error = fails(2, &["convert", &path("view"), "-o", &path("native"), "--to", "awq", "--overwrite"]);
    assert!(error.contains("other than the source"), "{error}");
    // A folder that a process is in would be another one's.
    fs::create_dir(path("empty")).unwrap();
    let (status, error) = run("empty", &["convert", "../native", "-o", ".", "--to", "gptq"]);
    assert!(status == Some(2) && error.contains("the folder that this runs in"), "{error}");
    // A stroke behind a name changes nothing.
    quiet(&["convert", &path("native"), "-o", &path("end.gguf/"), "--to", "gguf"]);
    assert!(fs::metadata(path("end.gguf")).unwrap().is_file());
}

#[test]
fn a_limit_on_the_size_of_files_is_an_error_like_a_full_disk() {
    let here = TempDir::new().unwrap();
    let path = |name: &str| here.path().join(name).display().to_string();
    let (m, quantized, ids) = (model(), path("quantized"), path("ids"));
    quiet(&["quantize", &m, "-o", &quantized]);
    write_ids(Path::new(&ids));
    let before = fs::read(here.path().join("quantized/model.safetensors")).unwrap();
    for args in [
        &["quantize", &m, "-o", &path("out")][..],
        &["quantize", &m, "-o", &quantized, "--overwrite", "--bits", "8"],
        &["dequantize", &quantized, "-o", &path("out")],
        &["convert", &quantized, "-o", &path("out.gguf"), "--to", "gguf"],
        &["convert", &quantized, "-o", &path("out"), "--to", "onnx"],
        &["eval", "logits", &m, "--ids", &ids, "-o", &path("out"), "--device", "cpu"],
    ] {
        let limited = Command::new("sh")
            .args(["-c", "ulimit -f 16; exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_halfbyte")])
            .args(args)
            .output()
            .unwrap();
        let error = text(&limited.stderr);
        assert_eq!(limited.status.code(), Some(4), "{args:?}: {:?}: {error}", limited.status);
        for wanted in ["error: cannot write ", "cause: File too large", "help: raise the limit", "ulimit -f"] {
            assert!(error.contains(wanted), "{args:?}: {error}");
        }
        assert_eq!(fs::read_dir(here.path()).unwrap().count(), 2, "{args:?}");
        assert!(fs::read(here.path().join("quantized/model.safetensors")).unwrap() == before);
    }
}
