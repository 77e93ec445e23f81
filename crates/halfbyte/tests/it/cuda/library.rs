//! Libraries are found where they should be, and what is missing says where it was looked for.

use super::{in_child, is_child};
use halfbyte::Error;
use halfbyte::cuda::driver::Driver;
use halfbyte::cuda::library::{self, Wanted};
use std::path::Path;

fn wanted(stem: &'static str, versions: &'static [u32]) -> Wanted {
    Wanted { name: "the library", stem, versions, variable: "HALFBYTE_TEST_LIBRARY", packages: &["cu13/lib"] }
}

fn looked(error: Error) -> Vec<String> {
    match error {
        Error::LibraryMissing { library: "the library", looked } => looked,
        other => panic!("{other}"),
    }
}

#[test]
fn a_library_of_the_system_is_found_with_its_path() {
    if cfg!(target_os = "linux") {
        let opened = library::open(&wanted("m", &[7, 6]), None).unwrap();
        assert!(opened.path().is_absolute() && opened.path().ends_with("libm.so.6"), "{}", opened.path().display());
        let missing = looked(library::open(&wanted("m", &[7, 6]), Some(5)).unwrap_err());
        assert!(missing.iter().all(|place| !place.starts_with("libm.so.6")), "newer than allowed: {missing:?}");
        assert!(library::is_there(&wanted("m", &[7, 6]), None) && !library::is_there(&wanted("m", &[7, 6]), Some(5)));
    }
}

#[test]
fn every_place_is_looked_at_and_named_when_there_is_nothing() {
    const TEST: &str = "cuda::library::every_place_is_looked_at_and_named_when_there_is_nothing";
    if !is_child() {
        let folder = tempfile::tempdir().unwrap();
        let python = folder.path().join("lib/python3.12/site-packages/nvidia");
        std::fs::create_dir_all(python.join("cu13/lib")).unwrap();
        // Any library will do.
        let some = library::open(&wanted("m", &[6]), None).unwrap();
        std::fs::copy(some.path(), python.join("cu13/lib/libof-python.so.13")).unwrap();
        let environment = folder.path().to_str().unwrap();
        return in_child(TEST, &[("VIRTUAL_ENV", environment), ("CUDA_HOME", "/nonexistent/cuda")]);
    }
    let opened = library::open(&wanted("of-python", &[13, 12]), None).unwrap();
    assert!(opened.path().ends_with("python3.12/site-packages/nvidia/cu13/lib/libof-python.so.13"));
    assert!(library::is_there(&wanted("of-python", &[13, 12]), None));
    assert!(!library::is_there(&wanted("of-nobody", &[13, 12]), None));
    let error = library::open(&wanted("of-nobody", &[13, 12]), None).unwrap_err();
    let text = error.to_string();
    let looked = looked(error);
    for place in ["libof-nobody.so.13 in the loader's path", "libof-nobody.so.12 in the loader's path"] {
        assert!(looked.iter().any(|looked| looked == place), "{looked:?}");
    }
    for place in ["/nonexistent/cuda/lib64/", "/usr/local/cuda/lib64/", "site-packages/nvidia/cu13/lib/libof-nobody.so"]
    {
        assert!(looked.iter().any(|looked| looked.contains(place)), "{place}: {looked:?}");
    }
    assert_eq!(looked.last().unwrap(), "HALFBYTE_TEST_LIBRARY is not set");
    assert_eq!(text.lines().count(), looked.len() + 1, "{text}");
}

#[test]
fn a_variable_is_the_only_place() {
    const TEST: &str = "cuda::library::a_variable_is_the_only_place";
    if !is_child() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("libm.so.6");
        std::fs::write(&file, "no library at all").unwrap();
        for place in [folder.path(), &file] {
            in_child(TEST, &[("HALFBYTE_TEST_LIBRARY", place.to_str().unwrap())]);
        }
        return;
    }
    // The system has this library, but the variable leads elsewhere: to something that lies there, and opens not.
    assert!(library::is_there(&wanted("m", &[6]), None));
    let looked = looked(library::open(&wanted("m", &[6]), None).unwrap_err());
    assert_eq!(looked.len(), 1);
    assert!(looked[0].starts_with("HALFBYTE_TEST_LIBRARY: ") && looked[0].contains("libm.so.6 ("), "{looked:?}");
}

#[test]
fn a_driver_is_opened_or_every_name_is_told() {
    match Driver::open() {
        Ok(driver) => {
            assert!(driver.version().major >= 12);
            assert!(driver.path().is_none_or(Path::is_absolute));
            assert!(driver.device(driver.devices().unwrap().len() as u32).is_err());
        }
        Err(Error::LibraryMissing { looked, .. }) => {
            assert!(looked.iter().any(|place| place.contains("libcuda.so.1")), "{looked:?}");
        }
        // A driver without a device, as in a container that was given none.
        Err(Error::Device { cause, .. }) => assert!(cause.contains("CUDA_ERROR"), "{cause}"),
        Err(other) => panic!("{other}"),
    }
}
