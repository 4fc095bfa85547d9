"""The SGLang adapter. Import its modules one by one: most of them import SGLang."""
